"""The self-check of a loaded model: the same tokens must have the same logits, whichever way they are read.

A prompt is read in one piece and in two, and a draft tree is compared with its paths, by the backends that serve requests; with
recurrent layers, a long prompt is also read in steps, cut, and read again. A model fails if it has a state other than its
cache, or if it ignores positions or the tree's mask, or counts positions differently. Knows nothing about architectures.

Two ways to read the same tokens round differently, and a deep model in 8 or 16 bits amplifies rounding: a constant limit that
one model keeps with ease, another exceeds without a fault. So a difference beyond the data type's own limit is compared with
the model's sensitivity: with how far its logits move when the embeddings of the text and the weights of the norms are all
rounded up or down in their last bit. That is what rounding does at the input and at each layer, in the model's own arithmetic,
and it costs two more forwards. A lost state or a wrong position moves logits by as much as another text would.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from random import Random
from typing import NamedTuple

import numpy as np
import torch

from outrider.drafters.interface import DraftTree, Source
from outrider.verify.errors import ModelError
from outrider.verify.model.batch import ForwardBatch
from outrider.verify.model.cache.tensor_cache import TensorCache
from outrider.verify.model.recurrent.states import ROWS
from outrider.verify.model.sizes import packed_layers
from outrider.verify.model.torch_runner import TorchRunner

# The tokens of the first piece. With the root and a path they are 13, which fit into the shortest context that can be set.
PREFIX = 7
# A tree of eight nodes, depth-first: two paths of five nodes that share the first two.
PARENTS = (-1, 0, 1, 2, 3, 1, 5, 6)
DEPTHS = (1, 2, 3, 4, 5, 3, 4, 5)
SHARED = 2
# The tokens of the long prompt, and where it is cut.
LONG, CUT = ROWS + 8, ROWS - 15
# The number of texts.
ATTEMPTS = 5
# The tokens of each text.
TEXT_TOKENS = PREFIX + 1 + len(PARENTS)
# In any row, rounding may reach this multiple of the median row's sensitivity.
SENSITIVITY = 3.0
# What `check_model` reads, as the model's tokens: at least ATTEMPTS * TEXT_TOKENS of them, of several kinds.
SAMPLE = (
    "The old lighthouse keeper climbed the stairs every evening to light the lamp, and every morning he wrote down which ships"
    " had passed. Water boils at one hundred degrees Celsius at sea level, and it freezes at zero degrees. def add(first,"
    " second):\n    return first + second\n\nprint(add(2, 3))\nIn 1969, two people walked on the Moon while a third one"
    " waited in orbit. Dear Ms. Miller, thank you for your letter of March 3; we will send your order soon."
)
# The names of layers without a state in transformers.
ATTENTION = ("full_attention", "sliding_attention", "chunked_attention")


def check_model(runner: TorchRunner, path: str, sample: Sequence[int] = ()) -> None:
    """Raises ModelError if the model does not pass; `path` names it in the message. Takes five forwards of up to 13 rows, and
    four of up to LONG rows for recurrent layers.

    `sample` has the tokens of SAMPLE: on text, a model is less chaotic than on the random tokens that are read without it.

    If a text fails, others are tried, and each row's smallest difference counts: in a mixture of experts, rounding can change
    a row's experts in some of the texts, but a lost state changes the same rows in all of them.
    """
    dtype = torch.bfloat16 if is_quantized(runner) else runner.cache_shape.dtype
    tolerance = math.sqrt(max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps))  # so half of the digits must agree
    cache = runner.new_cache()
    smallest: Differences | None = None
    for text in texts(runner.vocabulary, sample):
        found = differences(runner, cache, text)
        if any(each.isnan().any() for each in found):
            raise ModelError(
                f"The model at {path!r} computes NaN in {str(runner.cache_shape.dtype).removeprefix('torch.')};"
                " set another dtype, or check its weights."
            )
        limit = tolerance
        if max(float(each.max()) for each in found) > tolerance:
            limit = max(tolerance, SENSITIVITY * sensitivity(runner, cache, text, tolerance))
        found = Differences(*(each / limit for each in found))
        smallest = found if smallest is None else Differences(*map(torch.minimum, smallest, found))
        if max(float(each.max()) for each in smallest) <= 1:
            return
    assert smallest is not None
    if smallest.pieces.max() > 1:
        raise ModelError(
            f"The model at {path!r} reads a prompt differently in two pieces than in one: {_suspects(runner)} a state outside"
            " the KV cache, which is not supported; serve another model."
        )
    if smallest.tree.max() > 1:
        raise ModelError(
            f"The model at {path!r} reads a draft tree differently than the tree's paths: its tokens probably depend on each"
            " other outside of attention, which is not supported; serve another model."
        )
    if smallest.positions.max() > 1:
        raise ModelError(
            f"The model at {path!r} does not count its tokens' positions from 0, which is not supported; serve another model."
        )
    raise ModelError(
        f"The model at {path!r} reads a long prompt differently in steps than at once: {_suspects(runner)} a state that does"
        " not follow transformers' own recurrence; serve another model."
    )


class Differences(NamedTuple):
    """`difference` of some rows, which `check_model` divides by the limit."""

    pieces: torch.Tensor  # [6], of the second piece
    tree: torch.Tensor  # [9]
    positions: torch.Tensor  # [13], from logits at the positions that the model itself gives its tokens
    steps: torch.Tensor  # of the long prompt in steps, and after a cut; [1] zero without recurrent layers


def differences(runner: TorchRunner, cache: TensorCache, tokens: Sequence[int]) -> Differences:
    prefix, root, nodes = list(tokens[:PREFIX]), tokens[PREFIX], list(tokens[PREFIX + 1 :])
    first, second = nodes[: DEPTHS[-1]], nodes[:SHARED] + nodes[DEPTHS[-1] :]

    def read(batch: ForwardBatch) -> torch.Tensor:
        # A copy, since the next forward overwrites the logits.
        found: torch.Tensor = runner.forward(cache, batch).to(torch.float32, copy=True)
        return found

    cache.truncate(0)
    text = torch.tensor([*prefix, root, *first])
    alone = runner.read_alone(cache, text).to(torch.float32, copy=True)
    whole = read(ForwardBatch.chain(text))
    runner.forward(cache, ForwardBatch.chain(prefix), logits=False)
    cache.length = PREFIX
    first_path = read(ForwardBatch.chain([root, *first]))
    second_path = read(replace(ForwardBatch.chain([root, *second]), known=SHARED + 1))
    tree = read(ForwardBatch.tree(root, draft_tree(nodes)))
    of_tree = difference(tree, torch.cat([first_path, second_path]))
    steps = torch.zeros(1)
    if cache.recurrent is not None and runner.context_tokens > LONG:
        steps = _steps(runner, cache, (prefix + nodes) * LONG)
    return Differences(difference(first_path, whole[PREFIX:]), of_tree, difference(alone, whole), steps)


def _steps(runner: TorchRunner, cache: TensorCache, text: list[int]) -> torch.Tensor:
    """The differences of a long prompt's rows from the model's own form for long parts."""
    cache.truncate(0)
    whole = runner.forward(cache, ForwardBatch.chain(text[:LONG])).to(torch.float32, copy=True)
    found = []
    for start, end in ((0, CUT), (CUT, LONG)):
        found.append(runner.forward(cache, ForwardBatch.chain(text[start:end])).to(torch.float32, copy=True))
        cache.length = end
    cache.truncate(CUT + 1)
    start = cache.length
    again = runner.forward(cache, ForwardBatch.chain(text[start:LONG])).to(torch.float32, copy=True)
    return difference(torch.cat([*found, again]), torch.cat([whole, whole[start:]]))


def sensitivity(runner: TorchRunner, cache: TensorCache, tokens: Sequence[int], tolerance: float) -> float:
    """How far the median row's logits move if embeddings and norms are rounded differently in their last bit.

    0 if reading the same text twice gives different logits: then a state is lost, and the movement would be its.
    """
    text = torch.tensor(tokens[: PREFIX + 1 + DEPTHS[-1]])

    def read() -> torch.Tensor:
        cache.truncate(0)
        return runner.read_alone(cache, text).to(torch.float32, copy=True)

    read()  # so that what comes before the next two is the same
    first, second = read(), read()
    if float(difference(second, first).nan_to_num(torch.inf).max()) > tolerance:
        return 0.0
    with rounded_differently(runner, text, torch.finfo(torch.bfloat16).eps if is_quantized(runner) else 0.0):
        moved = read()
    return float(difference(moved, first).nan_to_num().median())


@contextmanager
def rounded_differently(runner: TorchRunner, text: torch.Tensor, least: float) -> Iterator[None]:
    """Multiplies the text's embeddings and the model's vectors of weights by 1 plus or minus their precision, or `least`.

    Embeddings that are packed for the library stay as they are.
    """
    embeddings = runner.model.get_input_embeddings().weight
    ids = text.unique().to(embeddings.device) if len(embeddings) else text[:0]
    vectors = [each for each in runner.model.parameters() if each.ndim == 1 and each.is_floating_point()]
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        saved = [each.clone() for each in vectors]
        rows = embeddings[ids].clone()
        try:
            for each in vectors:
                each.mul_(_last_bits(each, generator, least))
            embeddings[ids] = rows * _last_bits(rows, generator, least)
            yield
        finally:
            for each, before in zip(vectors, saved, strict=True):
                each.copy_(before)
            embeddings[ids] = rows


def _last_bits(values: torch.Tensor, generator: torch.Generator, least: float) -> torch.Tensor:
    """Factors of the values' shape, each 1 plus or minus the precision of their type."""
    signs = torch.randint(2, values.shape, generator=generator) * 2 - 1
    return (1 + signs * max(least, torch.finfo(values.dtype).eps)).to(values)


def is_quantized(runner: TorchRunner) -> bool:
    """Whether layers or the cache round to 8 bits: a difference in the last bit of float32 may become one of bfloat16."""
    return runner.cache_shape.coded is not None or any(layer.is_quantized for layer in packed_layers(runner.model))


def difference(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """The median difference of each row's logits relative to their median spread, [N], of logits [N, V].

    Medians, because some models mask part of the vocabulary with -inf or the smallest float.
    """
    spread = (expected - expected.median(-1, keepdim=True).values).abs().median(-1).values
    return ((found - expected).abs().nanmedian(-1).values / spread.clamp_min(torch.finfo(spread.dtype).tiny)).cpu()


def texts(vocabulary: int, sample: Sequence[int]) -> Iterator[list[int]]:
    """ATTEMPTS texts of TEXT_TOKENS tokens: parts of the sample, and random ones if it is too short."""
    for attempt in range(ATTEMPTS):
        part = list(sample[attempt * TEXT_TOKENS : (attempt + 1) * TEXT_TOKENS])
        middle = range(vocabulary // 4, vocabulary * 3 // 4 + 1)  # special tokens are at the ends of the vocabulary
        yield part if len(part) == TEXT_TOKENS else Random(attempt).choices(middle, k=TEXT_TOKENS)


def draft_tree(nodes: Sequence[int]) -> DraftTree:
    """The tree of PARENTS with these tokens."""
    size = len(nodes)
    tokens, parents, depths = (np.array(values, np.int32) for values in (nodes, PARENTS, DEPTHS))
    return DraftTree(tokens, parents, depths, np.ones(size, np.float32), np.full(size, Source.NONE, np.uint8))


def _suspects(runner: TorchRunner) -> str:
    """Names layers that probably keep a state: the message's subject and verb."""
    types = getattr(runner.model.config.get_text_config(), "layer_types", None) or ()
    others = sorted({kind for kind in types if kind not in ATTENTION})
    return f"its {' and '.join(others)} layers probably keep" if others else "one of its layers probably keeps"
