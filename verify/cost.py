"""The measured cost of a step on this machine: seconds by draft nodes, by context length and by number of streams.

A tree of 64 nodes is nearly free on a large GPU and costs ten steps on a laptop; the budget follows this curve.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import platform
import statistics
import time
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from drafters.interface import MAX_NODES, Source, chain
from verify.findings import save_finding
from verify.model.batch import ForwardBatch
from verify.model.cache.kv_cache import KVCache
from verify.model.runner import ModelRunner
from verify.sampling_params import SamplingParams
from verify.verifier import TreeVerifier

log = logging.getLogger("outrider.worker")

# With the root, powers of two: beyond them, matrix products need another tile.
NODES = (0, 1, 3, 7, 15, 31, 63, MAX_NODES)
STREAM_NODES = 63  # of each of several streams
CONTEXTS = (64, 512, 2048, 8192, 32768)
FEEDBACK = 8  # top tokens per row that drafters learn from by default
REPEATS = 7
POINT_SECONDS = 0.4  # no repeats of a point beyond this total
STREAMS = 4  # of the steps of several streams
KEPT_SHARE = 0.25
CONTEXT_STEP, ROWS_STEP = 64, 64  # costs are kept for multiples of these


@dataclass(frozen=True)
class CostCurve:
    """Seconds of a step by draft nodes, at several context lengths (tokens)."""

    nodes: tuple[int, ...]  # ascending, from 0 to the most that a step may have
    contexts: tuple[int, ...]  # ascending
    seconds: tuple[tuple[float, ...], ...]  # [contexts, nodes]
    row_seconds: float = 0.0  # of each row beyond those of one stream's largest step
    stream_seconds: float = 0.0  # of each further stream, beside its rows

    def at(self, context: int) -> NDArray[np.float64]:
        """Seconds of a step over 0, 1, ... nodes[-1] draft nodes after `context` tokens, float64 [nodes[-1] + 1]."""
        table = np.array(self.seconds)
        row = np.array([np.interp(context, self.contexts, column) for column in table.T])
        # More nodes never cost less. Noise adds time, so of two measurements that say so, the larger one is wrong.
        return np.interp(np.arange(self.nodes[-1] + 1), self.nodes, np.minimum.accumulate(row[::-1])[::-1])

    def of_rows(self, context: int, streams: int, rows: int) -> NDArray[np.float64]:
        """Seconds of a step of `streams` streams over 1, 2, ... `rows` rows in all, each after `context` tokens."""
        return extended(self, context // CONTEXT_STEP * CONTEXT_STEP, -(-rows // ROWS_STEP) * ROWS_STEP)[:rows] + (
            self.stream_seconds * (streams - 1)
        )

    def paying_streams(self, most: int) -> int:
        """How many streams, at most `most`, a round should have: each adds KEPT_SHARE of what it would have alone, or more."""
        context = self.contexts[0]
        rates = [streams / float(self.of_rows(context, streams, streams)[-1]) for streams in range(1, most + 1)]
        for streams, (fewer, rate) in enumerate(itertools.pairwise(rates), start=1):
            if rate - fewer < KEPT_SHARE * fewer / streams:
                return streams
        return most


@lru_cache(maxsize=64)
def extended(curve: CostCurve, context: int, rows: int) -> NDArray[np.float64]:
    """`CostCurve.at` by number of rows, float64 [rows]."""
    seconds = curve.at(context)
    more = np.arange(1, max(0, rows - len(seconds)) + 1)
    return np.concatenate([seconds, seconds[-1] + more * curve.row_seconds])[:rows]


def measure(runner: ModelRunner, nodes: tuple[int, ...] = NODES) -> CostCurve:
    """Times steps of every size over a zeroed cache. Takes a second on a small model, a minute on a slow one.

    Times whole steps, sampled and with feedback: on a small model, a node costs as much outside the forward as inside.
    """
    nodes = (*(count for count in nodes if count < runner.draft_nodes), runner.draft_nodes)
    contexts = tuple(c for c in CONTEXTS if c + MAX_NODES < runner.context_tokens) or (1,)
    streams = [started(runner, contexts[-1])]

    def median_seconds(context: int, count: int) -> float:
        return _median(streams, context, count, warm_up=context == contexts[0])

    rows = tuple(tuple(median_seconds(context, count) for count in nodes) for context in contexts)
    streams.clear()  # its cache may have all pages
    streams += [started(runner, contexts[0]) for _ in range(STREAMS)]
    few = _median(streams, contexts[0], 0, warm_up=True)
    one = np.interp(STREAMS - 1, nodes, rows[0])  # the same rows in one stream
    stream_seconds = max(0.0, (few - float(one)) / (STREAMS - 1))
    row_seconds = (rows[0][-1] - rows[0][-3]) / (nodes[-1] - nodes[-3])
    more = STREAMS * (STREAM_NODES + 1) - (nodes[-1] + 1)  # rows than those of one stream's largest step
    if runner.max_rows >= STREAMS * (STREAM_NODES + 1):
        many = _median(streams, contexts[0], STREAM_NODES, warm_up=True)
        row_seconds = (many - rows[0][-1] - stream_seconds * (STREAMS - 1)) / more
    return CostCurve(nodes, contexts, rows, max(0.0, row_seconds), stream_seconds)


def started(runner: ModelRunner, context: int) -> TreeVerifier:
    """A verifier after `context` zeros, which steps may exceed by MAX_NODES."""
    cache = runner.new_cache()
    verifier = TreeVerifier(runner, cache)
    verifier.begin(np.zeros(context + 1, np.int32), SamplingParams(), max_tokens=MAX_NODES + 1)
    cache.fill(context)  # denormal numbers in fresh memory would be slow
    return verifier


def _median(verifiers: list[TreeVerifier], context: int, nodes: int, warm_up: bool) -> float:
    """Seconds of a step of all verifiers after `context` tokens, over `nodes` draft nodes each."""
    if warm_up:
        _step_seconds(verifiers, context, nodes)  # the first step of a size allocates and chooses algorithms
    times: list[float] = []
    while not times or (len(times) < REPEATS and sum(times) < POINT_SECONDS):
        times.append(_step_seconds(verifiers, context, nodes))
    return statistics.median(times)


def _step_seconds(verifiers: list[TreeVerifier], context: int, nodes: int) -> float:
    tree = chain(np.zeros(nodes, np.int32), np.ones(nodes, np.float32), Source.NONE)
    for verifier in verifiers:
        verifier.sequence.begin(np.zeros(context + 1, np.int32))
        verifier.cache.assume(context)
    started_at = time.perf_counter()
    logits = verifiers[0].runner.forward_all([verifier.segment(tree) for verifier in verifiers])
    for verifier, rows in zip(verifiers, logits, strict=True):
        verifier.commit(verifier.judge(tree, rows, FEEDBACK))
    return time.perf_counter() - started_at


def timed_forward(runner: ModelRunner, cache: KVCache, nodes: int) -> float:
    """Seconds of one forward over the root and a chain of `nodes`, including the greedy choice at each row."""
    batch = ForwardBatch.chain(torch.zeros(nodes + 1, dtype=torch.long))
    started = time.perf_counter()
    runner.forward(cache, batch).max(-1).indices.cpu()
    return time.perf_counter() - started


def load_or_measure(runner: ModelRunner, folder: Path | None) -> CostCurve:
    """The curve of this model on this machine: loaded from `folder`, or measured and saved there."""
    if folder is None:
        return measure(runner)
    path = folder / f"{machine_key(runner)}.json"
    try:
        return parse(path.read_text(), runner.draft_nodes)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        log.warning("%s is not a cost curve (%s), so the cost of a step is measured again", path, error)
    curve = measure(runner)
    save_finding(asdict(curve), path)
    return curve


def parse(text: str, most: int = MAX_NODES) -> CostCurve:
    """The curve in a saved file, of 0 to `most` nodes. Raises ValueError if it is not a complete one."""
    try:
        saved = json.loads(text)
        nodes, contexts = (np.array(saved[name], np.int64) for name in ("nodes", "contexts"))
        seconds = np.array(saved["seconds"], np.float64)
        further = np.array([saved[name] for name in ("row_seconds", "stream_seconds")], np.float64)
    except (KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None
    for name, values in (("nodes", nodes), ("contexts", contexts)):
        if values.ndim != 1 or not len(values) or np.any(np.diff(values) <= 0):
            raise ValueError(f"{name} must be ascending numbers")
    if nodes[0] != 0 or nodes[-1] != most or contexts[0] < 1:
        raise ValueError(f"nodes must be 0 to {most}, and contexts positive")
    if not np.all((further >= 0) & np.isfinite(further)):
        raise ValueError("row_seconds and stream_seconds must be numbers of at least 0")
    if seconds.shape != (len(contexts), len(nodes)) or not np.all((seconds > 0) & np.isfinite(seconds)):
        raise ValueError("seconds must be positive numbers by contexts and nodes")
    return CostCurve(tuple(nodes.tolist()), tuple(contexts.tolist()), tuple(map(tuple, seconds.tolist())), *further.tolist())


def processor_name() -> str:
    """The processor's model name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def machine_key(runner: ModelRunner) -> str:
    """A hash of what measurements depend on: model, dtype, machine, torch version and threads."""
    device = runner.device
    # No host name: every container has another one.
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{processor_name()} {os.cpu_count()}"
    shape = runner.cache_shape
    parts = [
        f"whole steps over {NODES} and of {STREAMS} streams, rows {runner.row_class}, {runner.backends}",
        runner.model.config.to_json_string(),
        f"{shape.dtype} {shape.stored_dtype}",
        machine,
        torch.__version__,
        str(torch.get_num_threads()),
    ]
    return hashlib.sha256("\0".join([*parts, str(runner.context_tokens)]).encode()).hexdigest()[:16]
