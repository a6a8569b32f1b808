"""What a step costs on this machine, measured: seconds by draft nodes and by context length.

A tree of 64 nodes is nearly free on a large GPU and ten steps' worth on a laptop; the budget follows this curve.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from drafters.interface import MAX_NODES, Source, chain
from verify.model.batch import ForwardBatch
from verify.model.cache import KVCache
from verify.model.runner import ModelRunner
from verify.sampling_params import SamplingParams
from verify.verifier import TreeVerifier

NODES = (
    0,
    1,
    3,
    7,
    15,
    31,
    63,
    MAX_NODES,
)  # with the last committed token, powers of two: beyond them, matrices take more tiles
CONTEXTS = (64, 512, 2048, 8192, 32768)
FEEDBACK = 8  # of the target's likeliest tokens, what drafters learn from by default
REPEATS = 7
POINT_SECONDS = 0.4  # no more repeats once a point has taken so long


@dataclass(frozen=True)
class CostCurve:
    """Seconds of a step by draft nodes, at several context lengths."""

    nodes: tuple[int, ...]  # ascending, from 0 to MAX_NODES
    contexts: tuple[int, ...]  # ascending
    seconds: tuple[tuple[float, ...], ...]  # [contexts, nodes]

    def at(self, context: int) -> NDArray[np.float64]:
        """Seconds of a step over 0, 1, ... MAX_NODES draft nodes after `context` tokens, float64 [MAX_NODES + 1]."""
        table = np.array(self.seconds)
        row = np.array([np.interp(context, self.contexts, column) for column in table.T])
        # More nodes never cost less: where they seem to, that is noise.
        return np.interp(np.arange(MAX_NODES + 1), self.nodes, np.maximum.accumulate(row))


def measure(runner: ModelRunner, nodes: tuple[int, ...] = NODES) -> CostCurve:
    """Runs steps of every size over an empty cache; takes seconds on a small model, a minute on a slow one.

    Whole steps, sampled and with feedback: on a small model, each node costs as much beside the forward as in it.
    """
    cache = runner.new_cache()
    contexts = tuple(c for c in CONTEXTS if c + MAX_NODES < runner.context_tokens) or (1,)
    cache.tensor[:, :, :, : contexts[-1]] = 0  # what lies in fresh memory may be slow to compute with
    verifier = TreeVerifier(runner, cache)
    verifier.begin(np.zeros(contexts[-1] + 1, np.int32), SamplingParams(), max_tokens=MAX_NODES + 1)

    def step_seconds(context: int, count: int) -> float:
        tree = chain(np.zeros(count, np.int32), np.ones(count, np.float32), Source.NONE)
        times: list[float] = []
        begun = time.perf_counter()
        while len(times) <= 1 or (len(times) <= REPEATS and time.perf_counter() - begun < POINT_SECONDS):
            verifier.sequence.begin(np.zeros(context + 1, np.int32))
            cache.length = context
            started = time.perf_counter()
            verifier.commit(verifier.verify(tree, FEEDBACK))
            times.append(time.perf_counter() - started)
        return statistics.median(times[1:])  # the first one warms up

    rows = (tuple(step_seconds(context, count) for count in nodes) for context in contexts)
    return CostCurve(nodes, contexts, tuple(rows))


def timed_forward(runner: ModelRunner, cache: KVCache, nodes: int) -> float:
    """Seconds of one forward over the last token and a chain of so many nodes, and of its greedy choices."""
    batch = ForwardBatch.chain(torch.zeros(nodes + 1, dtype=torch.long))
    started = time.perf_counter()
    runner.forward(cache, batch).max(-1).indices.cpu()
    return time.perf_counter() - started


def load_or_measure(runner: ModelRunner, folder: Path | None) -> CostCurve:
    """The curve of this model on this machine: from `folder` where an earlier start has left it there, else measured."""
    if folder is None:
        return measure(runner)
    path = folder / f"{_key(runner)}.json"
    try:
        kept = json.loads(path.read_text())
        return CostCurve(tuple(kept["nodes"]), tuple(kept["contexts"]), tuple(tuple(row) for row in kept["seconds"]))
    except (OSError, ValueError, KeyError, TypeError):
        curve = measure(runner)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        partial.write_text(json.dumps(asdict(curve)))
        partial.replace(path)
    except OSError:
        pass  # a folder that cannot be written costs the next start a measurement
    return curve


def processor() -> str:
    """The processor in words, and how many cores there are; not the host's name, which each container has anew."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{name} {os.cpu_count()}"


def _key(runner: ModelRunner) -> str:
    """Equal exactly where steps cost the same: model, numbers, machine, torch."""
    device = runner.device
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else processor()
    shape = runner.cache_shape
    parts = [
        f"whole steps over {NODES}",
        runner.model.config.to_json_string(),
        str(shape.dtype),
        machine,
        torch.__version__,
        str(torch.get_num_threads()),
    ]
    return hashlib.sha256("\0".join([*parts, str(runner.context_tokens)]).encode()).hexdigest()[:16]
