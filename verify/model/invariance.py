"""Checks whether a GPU's kernels give a row the same bits in every step.

Kernels of our own do so by construction. What PyTorch computes may differ between numbers of rows. So the model is run over
draft trees, beside another stream, and over their paths one token at a time, which must give the same bits.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np
import torch

from outrider.verify.errors import ModelError
from outrider.verify.findings import save_finding
from outrider.verify.model.batch import ForwardBatch, Segment
from outrider.verify.model.cache.tensor_cache import TensorCache
from outrider.verify.model.gpu.text_work import INVARIANT_ROWS, depth_left
from outrider.verify.model.load_options import Invariant
from outrider.verify.model.torch_runner import TorchRunner

# The version of saved findings. It changes with the attention, the products and the trees.
VERSION = 12


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


def start(runner: TorchRunner, context_tokens: int, invariant: Invariant, file: Path | None) -> None:
    """Starts the runner, with invariant rows if `invariant` asks for them. Raises ModelError.

    Whether they are is saved in `file`; the next start checks one tree alone, or does not try.
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
    known, runner.tiles_file = _saved(file), file and file.with_suffix(".tiles.json")
    if runner.cache_shape.recurrent is None and known is not False:
        runner.start(context_tokens, INVARIANT_ROWS)
        if holds(runner, TREES[:1] if known else TREES):
            save_finding({"version": VERSION, "holds": True}, file)
            runner.invariance = "on"
            return
    save_finding({"version": VERSION, "holds": False}, file)
    if invariant == "on":
        raise ModelError("On this machine, this model's logits depend on the draft's size; set model.invariant to auto.")
    runner.start(context_tokens)
    runner.invariance = "impossible with this machine's kernels"


def holds(runner: TorchRunner, trees: Sequence[Tree]) -> bool:
    """Whether trees over random texts have the bits of their paths; texts that the context does not hold are left out."""
    cache, other = runner.new_cache(), runner.new_cache()
    return all(tree_equals_path(runner, cache, other, tree) for tree in trees if tree.text + tree.nodes < runner.context_tokens)


def tree_equals_path(runner: TorchRunner, cache: TensorCache, other: TensorCache, tree: Tree) -> bool:
    """Compares the logits along a random tree's last path, computed beside another stream, with those of single tokens."""
    random, noise = Random(tree.nodes), torch.Generator(runner.device).manual_seed(tree.text)
    cache.fill(tree.text, noise)
    other.fill(OTHER_TEXT, noise)
    depth = depth_left(tree.text)
    parents, depths = [-1], [0]  # of rows; row 0 is the root
    while len(parents) <= tree.nodes:
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


def _saved(file: Path | None) -> bool | None:
    """Whether rows were found to be invariant; None if nothing was found, or by other code."""
    try:
        saved = json.loads(file.read_text()) if file else {}
        return bool(saved["holds"]) if saved["version"] == VERSION else None
    except (OSError, ValueError, TypeError, KeyError):
        return None
