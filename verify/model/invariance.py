"""Finds out whether a GPU's kernels give a row the same bits in every step, and what that costs.

Kernels of our own do so by construction. Those of PyTorch may compute one row differently than several, or thirty-three
differently than thirty-two. So ranges of numbers of rows are tried: the model is run over draft trees, beside another
stream, and over their paths one token at a time, which must give the same bits.
"""

from __future__ import annotations

import json
import logging
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np
import torch

from outrider.verify.errors import ModelError
from outrider.verify.findings import save_finding
from outrider.verify.model.batch import ForwardBatch
from outrider.verify.model.cache.tensor_cache import TensorCache
from outrider.verify.model.gpu.row_counts import RANGE_ROWS, ROWS
from outrider.verify.model.invariant_range import Invariant, InvariantRange, depth_left
from outrider.verify.model.mode import Mode
from outrider.verify.model.segment import Segment
from outrider.verify.model.torch_runner import TorchRunner

log = logging.getLogger("outrider.worker")
# The version of saved findings. It changes with the attention, the products and the trees.
VERSION = 10
# The share of a step's time that `auto` may spend on invariance; `on` refuses to start where rows cannot be invariant.
MAX_COST = 0.05
# The ranges to try, those that pad steps least first. Torch.compile makes a kernel of its own for one row, so the first range
# begins with two: it costs nothing. In the last one, all forwards have the same number of rows, so it needs nothing of the
# kernels but that a row's place among the others does not matter.
FEW_ROWS = 2
RANGES = (InvariantRange(FEW_ROWS, ROWS[-1]), InvariantRange(RANGE_ROWS, RANGE_ROWS))


class Tree(NamedTuple):
    """The sizes of a draft tree to compare."""

    text: int  # tokens before it
    nodes: int
    beside: int = 3  # rows of another stream in the same forward


# Together with the single tokens of their paths, they have every number of rows for which graphs are captured.
TREES = (
    Tree(5, 8),
    Tree(1, 128),
    Tree(70, 17),
    Tree(614, 40),
    Tree(9, 4),
    Tree(40, 64),
    Tree(3, 100),
    Tree(64, 128, beside=10),
)
# The text of the stream beside them.
OTHER_TEXT = 3
COST_CONTEXT, COST_ROWS, COST_ROUNDS = 256, (1, 9), 9


@dataclass(frozen=True)
class ProbeResult:
    """The result of probing a model on this machine."""

    bounds: InvariantRange | None  # None = no invariant range was found
    cost: float  # share of a step's time that padding and splitting add; 0 without a range, or if nothing is padded

    def chosen(self, most: float) -> InvariantRange | None:
        """The range if it costs at most this share."""
        return self.bounds if self.cost <= most else None


def start(runner: TorchRunner, context_tokens: int, invariant: Invariant, file: Path | None) -> None:
    """Starts the runner, in an invariant range if `invariant` asks for it. Raises ModelError.

    The finding is saved in `file`, and read from it at the next start. If it does not hold any more, because other kernels were
    compiled, a range is searched again.
    """
    if not runner.in_pages and invariant == "on":
        raise ModelError(
            "On a CPU, rows of a model that PyTorch computes depend on the draft's size; set model.invariant to auto, or serve"
            " a model of a family that the compiled library computes."
        )
    if not runner.in_pages or invariant == "off":
        runner.start(context_tokens)
        runner.invariance = "off"
        return
    found, most = _saved(file), math.inf if invariant == "on" else MAX_COST
    if found is not None and not _starts(runner, context_tokens, found.chosen(most)):
        log.warning("rows are not invariant any more on this machine, so a range is searched again")
        found = None
    if found is None:
        found = find(runner, context_tokens, most)
        save_finding({"version": VERSION, **asdict(found)}, file)
    if invariant == "on" and found.bounds is None:
        raise ModelError("On this machine, this model's logits depend on the draft's size; set model.invariant to auto.")
    chosen = found.chosen(most)
    if runner.mode.backend is None or runner.invariant_range != chosen:
        runner.start(context_tokens, chosen)
    runner.invariance = describe(found, chosen)


def _starts(runner: TorchRunner, context_tokens: int, bounds: InvariantRange | None) -> bool:
    """Starts the runner in a range that was saved; returns whether it still holds, as far as one tree tells."""
    runner.start(context_tokens, bounds)
    return bounds is None or holds(runner, TREES[:1])


def describe(found: ProbeResult, chosen: InvariantRange | None) -> str:
    """Describes the result and the choice in a few words."""
    if found.bounds is None:
        return "impossible with this machine's kernels"
    cost = f", costs {found.cost:.1%} of a step" if found.cost else ""
    return f"{'off' if chosen is None else 'on'}, {found.bounds.low} to {found.bounds.high} rows{cost}"


def find(runner: TorchRunner, context_tokens: int, most: float = MAX_COST) -> ProbeResult:
    """Finds the invariant range and measures its cost; none for a model with states, or with layers of several shapes.

    If there is one, leaves the runner started in it, or without it if it costs more than `most`.
    """
    for bounds in RANGES if runner.can_be_ordered else ():
        runner.start(context_tokens, bounds)
        if holds(runner, TREES):
            found = ProbeResult(bounds, 0.0)
            if bounds.low > FEW_ROWS:
                within = runner.mode
                runner.start(context_tokens)
                found = ProbeResult(bounds, cost(runner, within, runner.mode))
                runner.mode = within if found.chosen(most) else runner.mode
            return found
    return ProbeResult(None, 0.0)


def holds(runner: TorchRunner, trees: Sequence[Tree]) -> bool:
    """Whether trees over random texts have the bits of their paths; texts that the context does not hold are left out."""
    cache, other = runner.new_cache(), runner.new_cache()
    return all(tree_equals_path(runner, cache, other, tree) for tree in trees if tree.text + tree.nodes < runner.context_tokens)


def tree_equals_path(runner: TorchRunner, cache: TensorCache, other: TensorCache, tree: Tree) -> bool:
    """Compares the logits along a random tree's last path, computed beside another stream, with those of single tokens."""
    random, noise = Random(tree.nodes), torch.Generator(runner.device).manual_seed(tree.text)
    cache.fill(tree.text, noise)
    other.fill(OTHER_TEXT, noise)
    depth, nodes = depth_left(tree.text), min(tree.nodes, runner.draft_nodes)
    parents, depths = [-1], [0]  # of rows; row 0 is the root
    while len(parents) <= nodes:
        parent = random.choice([row for row in range(max(0, len(parents) - 4), len(parents)) if depths[row] < depth] or [0])
        parents.append(parent)
        depths.append(depths[parent] + 1)
    tokens = np.array(random.choices(range(runner.vocabulary), k=len(parents)))
    ancestors = np.eye(len(parents), dtype=np.bool_)
    for row, parent in enumerate(parents[1:], start=1):
        ancestors[row] |= ancestors[parent]
    rows = Segment(cache, ForwardBatch(tokens, np.array(depths), ancestors))
    beside = Segment(other, ForwardBatch.chain(np.resize(tokens, tree.beside)))
    logits = runner.forward_all([beside, rows])[1].clone()
    for row in np.flatnonzero(ancestors[-1]).tolist():
        step = Segment(cache, ForwardBatch.chain(tokens[row : row + 1]))
        alone = runner.forward_all([step])[0].clone()
        beside_prompt = runner.forward_all([beside._replace(logits=False), step])[1]
        cache.length += 1
        if not (torch.equal(alone[0], logits[row]) and torch.equal(alone, beside_prompt)):
            return False
    return True


def cost(runner: TorchRunner, within: Mode, without: Mode) -> float:
    """The share of a step's time that computing in a range adds, measured in turns. The modes are of the runner."""
    cache = runner.new_cache()
    cache.fill(max(0, min(COST_CONTEXT, runner.context_tokens - max(COST_ROWS))))
    ratios = []
    for _ in range(COST_ROUNDS + 1):
        runner.mode = without
        plain = sum(_seconds(runner, cache))
        runner.mode = within
        ratios.append(sum(_seconds(runner, cache)) / plain)
    runner.mode = without
    return statistics.median(ratios[1:]) - 1


def _seconds(runner: TorchRunner, cache: TensorCache) -> Iterator[float]:
    for rows in COST_ROWS:
        batch = ForwardBatch.chain(Random(rows).choices(range(runner.vocabulary), k=rows))
        started = time.perf_counter()
        runner.forward(cache, batch)[-1:].cpu()  # waits for the device
        yield time.perf_counter() - started


def _saved(file: Path | None) -> ProbeResult | None:
    try:
        saved = json.loads(file.read_text()) if file else {}
        if saved.get("version") != VERSION:
            return None
        bounds = saved["bounds"] and InvariantRange(**{name: int(value) for name, value in saved["bounds"].items()})
        if bounds and not 1 <= bounds.low <= bounds.high:
            return None
        return ProbeResult(bounds, float(saved["cost"]))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
