"""The self-check of a loaded model: the same tokens must have the same logits, whichever way they are read.

A prompt is read in one piece and in two, and a draft tree is compared with its paths, by the backends that serve requests; with
recurrent layers, a long prompt is also read in steps, cut, and read again. A model fails if it has a state other than its
cache, or if it ignores positions or the tree's mask, or counts positions differently. Knows nothing about architectures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import NamedTuple

import numpy as np
import torch

from drafters.interface import DraftTree, Source
from verify.errors import ModelError
from verify.model.batch import ForwardBatch
from verify.model.cache.kv_cache import KVCache
from verify.model.cpu.packing import packed_layers
from verify.model.recurrent.states import ROWS
from verify.model.runner import ModelRunner

PREFIX = 7  # tokens of the first piece; with the root and a path 13, which fit into the shortest context that can be set
# A tree of eight nodes, depth-first: two paths of five nodes that share the first two.
PARENTS = (-1, 0, 1, 2, 3, 1, 5, 6)
DEPTHS = (1, 2, 3, 4, 5, 3, 4, 5)
SHARED = 2
LONG, CUT = ROWS + 8, ROWS - 15  # tokens of the long prompt, and where it is cut
ATTEMPTS = 5  # texts
ATTENTION = ("full_attention", "sliding_attention", "chunked_attention")  # transformers' names of layers without a state


def check_model(runner: ModelRunner, path: str) -> None:
    """Raises ModelError if the model does not pass; `path` names it in the message. Takes five forwards of up to 13 rows, and
    four of up to LONG rows for recurrent layers.

    If a text fails, others are tried, and each row's smallest difference counts: in a mixture of experts, rounding can change
    a row's experts in some of the texts, but a lost state changes the same rows in all of them.
    """
    tolerance = tolerance_of(torch.bfloat16 if is_quantized(runner) else runner.cache_shape.dtype)
    cache = runner.new_cache()
    smallest: Differences | None = None
    for seed in range(ATTEMPTS):
        found = differences(runner, cache, seed)
        if any(each.isnan().any() for each in found):
            raise ModelError(
                f"The model at {path!r} computes NaN in {str(runner.cache_shape.dtype).removeprefix('torch.')};"
                " set another dtype, or check its weights."
            )
        smallest = found if smallest is None else Differences(*map(torch.minimum, smallest, found))
        if max(float(each.max()) for each in smallest) <= tolerance:
            return
    assert smallest is not None
    if smallest.pieces.max() > tolerance:
        raise ModelError(
            f"The model at {path!r} reads a prompt differently in two pieces than in one: {_suspects(runner)} a state outside"
            " the KV cache, which is not supported; serve another model."
        )
    if smallest.tree.max() > tolerance:
        raise ModelError(
            f"The model at {path!r} reads a draft tree differently than the tree's paths: its tokens probably depend on each"
            " other outside of attention, which is not supported; serve another model."
        )
    if smallest.positions.max() > tolerance:
        raise ModelError(
            f"The model at {path!r} does not count its tokens' positions from 0, which is not supported; serve another model."
        )
    raise ModelError(
        f"The model at {path!r} reads a long prompt differently in steps than at once: {_suspects(runner)} a state that does"
        " not follow transformers' own recurrence; serve another model."
    )


class Differences(NamedTuple):
    """`difference` of some rows."""

    pieces: torch.Tensor  # [6], of the second piece
    tree: torch.Tensor  # [9]
    positions: torch.Tensor  # [13], from logits at the positions that the model itself gives its tokens
    steps: torch.Tensor  # of the long prompt in steps, and after a cut; [1] zero without recurrent layers


def differences(runner: ModelRunner, cache: KVCache, seed: int) -> Differences:
    """The differences for the texts of this seed."""
    prefix, root, nodes = random_text(runner.vocabulary, seed)
    first, second = nodes[: DEPTHS[-1]], nodes[:SHARED] + nodes[DEPTHS[-1] :]

    def read(batch: ForwardBatch) -> torch.Tensor:
        # A copy, since the next forward overwrites the logits.
        return runner.forward(cache, batch).to(torch.float32, copy=True)

    cache.truncate(0)
    text = torch.tensor([*prefix, root, *first])
    alone = runner.read_alone(cache, text).to(torch.float32, copy=True)
    whole = read(ForwardBatch.chain(text))
    runner.forward(cache, chain(prefix), logits=False)
    cache.length = PREFIX
    first_path = read(chain([root, *first]))
    second_path = read(replace(chain([root, *second]), known=SHARED + 1))
    tree = read(ForwardBatch.tree(root, draft_tree(nodes)))
    of_tree = difference(tree, torch.cat([first_path, second_path]))
    steps = torch.zeros(1)
    if cache.recurrent is not None and runner.context_tokens > LONG:
        steps = _steps(runner, cache, (prefix + nodes) * LONG)
    return Differences(difference(first_path, whole[PREFIX:]), of_tree, difference(alone, whole), steps)


def _steps(runner: ModelRunner, cache: KVCache, text: list[int]) -> torch.Tensor:
    """The differences of a long prompt's rows from the model's own form for long parts."""
    cache.truncate(0)
    whole = runner.forward(cache, chain(text[:LONG])).to(torch.float32, copy=True)
    found = []
    for start, end in ((0, CUT), (CUT, LONG)):
        found.append(runner.forward(cache, chain(text[start:end])).to(torch.float32, copy=True))
        cache.length = end
    cache.truncate(CUT + 1)
    start = cache.length
    again = runner.forward(cache, chain(text[start:LONG])).to(torch.float32, copy=True)
    return difference(torch.cat([*found, again]), torch.cat([whole, whole[start:]]))


def tolerance_of(dtype: torch.dtype) -> float:
    """The largest difference that passes: the square root of the machine epsilon, so half of the digits must agree."""
    return math.sqrt(max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps))


def is_quantized(runner: ModelRunner) -> bool:
    """Whether layers or the cache round to 8 bits: a difference in the last bit of float32 may become one of bfloat16."""
    return runner.cache_shape.coded is not None or any(layer.is_quantized for layer in packed_layers(runner.model))


def difference(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """The median difference of each row's logits relative to their median spread, [N], of logits [N, V].

    Medians, because some models mask part of the vocabulary with -inf or the smallest float.
    """
    spread = (expected - expected.median(-1, keepdim=True).values).abs().median(-1).values
    return ((found - expected).abs().nanmedian(-1).values / spread.clamp_min(torch.finfo(spread.dtype).tiny)).cpu()


def random_text(vocabulary: int, seed: int) -> tuple[list[int], int, list[int]]:
    """Tokens of the prefix, the root and the nodes, from the middle of the vocabulary: special tokens are at its ends."""
    random = Random(seed)
    ids = random.choices(range(vocabulary // 4, vocabulary * 3 // 4 + 1), k=PREFIX + 1 + len(PARENTS))
    return ids[:PREFIX], ids[PREFIX], ids[PREFIX + 1 :]


def chain(tokens: Sequence[int]) -> ForwardBatch:
    """Consecutive tokens as a batch."""
    return ForwardBatch.chain(torch.tensor(tokens))


def draft_tree(nodes: Sequence[int]) -> DraftTree:
    """The tree of PARENTS with these tokens."""
    size = len(nodes)
    tokens, parents, depths = (np.array(values, np.int32) for values in (nodes, PARENTS, DEPTHS))
    return DraftTree(tokens, parents, depths, np.ones(size, np.float32), np.full(size, Source.NONE, np.uint8))


def _suspects(runner: ModelRunner) -> str:
    """Which layers probably keep a state: the message's subject and verb."""
    types = getattr(runner.model.config.get_text_config(), "layer_types", None) or ()
    others = sorted({kind for kind in types if kind not in ATTENTION})
    return f"its {' and '.join(others)} layers probably keep" if others else "one of its layers probably keeps"
