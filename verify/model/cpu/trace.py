"""A model's forward as a TorchScript trace, which runs without Python for any number of rows and any text length.

On a CPU, a small model's forward spends as much time in Python as in its layers. The trace's logits are checked to be
bit-identical to the model's. `trace` returns None for models that cannot be traced: those with data-dependent routing, and
those with recurrent layers, or whose attention uses soft-capping or sinks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple, cast

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from outrider.verify.model.attention.dot_product import DotProducts, dot_product_attention
from outrider.verify.model.attention.interface import Layer
from outrider.verify.model.attention.shape_probe import ShapeProbe
from outrider.verify.model.attention.torch_attention import TorchAttention, flash
from outrider.verify.model.batch import ForwardBatch
from outrider.verify.model.cache.codec import encode
from outrider.verify.model.cache.shape import CacheShape
from outrider.verify.model.cache.tensor_cache import TensorCache
from outrider.verify.model.cpu.torchscript import ScriptList, run, script, traced, without_warnings
from outrider.verify.model.hidden.tap import HiddenTap
from outrider.verify.model.kwarg_injector import KwargInjector
from outrider.verify.model.packed import packed_layers
from outrider.verify.model.segment import Segment, keep_hidden, kept_rows, positions_of, tokens_of

# The rows and the text lengths of the streams that are compared.
CHECKS = ((1, 3), (2, 9), (7, 0), (17, 30), (3, 70))
# The limit of streams in one forward.
STREAMS = 16
# The limit of rows in one forward.
MAX_ROWS = 1024


def attend_by(products: DotProducts) -> Any:
    """`TorchAttention.attend` as a function for TorchScript: a trace would hard-code the slice bounds."""

    def attend(
        query: torch.Tensor,  # [heads, N, head_dim]
        key: torch.Tensor,  # [kv_heads, N, head_dim]
        value: torch.Tensor,
        keys: torch.Tensor,  # [kv_heads, positions, stored width]; the layer's cache
        values: torch.Tensor,
        length: torch.Tensor,  # int64 []; positions written before
        inputs: list[torch.Tensor],  # of `attention_masks`
        scaling: float,
    ) -> torch.Tensor:
        first, mask = inputs
        start = int(length)
        end = start + key.size(1)
        keys[:, start:end] = encode(key, keys.dtype)
        values[:, start:end] = encode(value, values.dtype)
        packed, read = query.reshape(key.size(0), -1, query.size(2)), int(first)
        all_keys, all_values = keys[:, read:end], values[:, read:end]
        allowed = mask if mask.numel() else None
        if keys.element_size() == 1:
            out = flash(packed, all_keys, all_values, allowed, scaling)[0].to(query.dtype)
        else:
            out = products(packed, all_keys, all_values, allowed, scaling)
        return out.reshape(query.size(0), query.size(1), query.size(2))

    return attend


def script_all(attend: Any) -> Any:
    """The script of an attention function for the rows of several streams."""

    def attend_all(
        query: torch.Tensor,  # [heads, N, head_dim]; the streams' rows, one stream after the other
        key: torch.Tensor,
        value: torch.Tensor,
        caches: list[torch.Tensor],  # [layers, 2, kv_heads, positions, stored width]; one for each stream
        layer: int,
        starts: torch.Tensor,  # int64 [S]; positions written before
        counts: torch.Tensor,  # int64 [S]; rows
        inputs: list[torch.Tensor],  # the same number for each stream
        scaling: float,
    ) -> torch.Tensor:
        size = len(inputs) // len(caches)
        if counts.size(0) == 1:
            cache = caches[0][layer]
            return attend(query, key, value, cache[0], cache[1], starts[0], inputs[:size], scaling)  # type: ignore[no-any-return]
        parts: list[torch.Tensor] = []
        first = 0
        for stream in range(counts.size(0)):
            end = first + int(counts[stream])
            cache = caches[stream][layer]
            of_stream = inputs[size * stream : size * (stream + 1)]
            rows = (query[:, first:end], key[:, first:end], value[:, first:end])
            parts.append(attend(rows[0], rows[1], rows[2], cache[0], cache[1], starts[stream], of_stream, scaling))
            first = end
        return torch.cat(parts, 1)

    return script(attend_all)


# The attention's tensors for a stream's rows: for each window the same number.
BuildInputs = Callable[[TensorCache, ForwardBatch], list[list[torch.Tensor]]]


class _Streams(NamedTuple):
    """What the script takes of each stream."""

    caches: list[torch.Tensor]
    starts: torch.Tensor
    counts: torch.Tensor


class _Untraceable(Exception):
    """The model's attention is not supported in a trace."""


class _TracedAttention:
    """Calls the scripted attention while the model is traced. Implements `outrider.verify.model.attention.Attention`."""

    def __init__(self, script: Any, streams: _Streams, inputs: dict[int | None, list[torch.Tensor]]) -> None:
        self._script, self._streams, self._inputs = script, streams, inputs

    def attend(self, layer: Layer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if layer.softcap is not None or layer.sinks is not None:
            raise _Untraceable
        out = self._script(
            query=query,
            key=key,
            value=value,
            caches=self._streams.caches,
            layer=layer.index,
            starts=self._streams.starts,
            counts=self._streams.counts,
            inputs=self._inputs[layer.window],
            scaling=layer.scaling,
        )
        return cast(torch.Tensor, out)


class _Forward(torch.nn.Module):
    """The model as a function of tensors only."""

    def __init__(
        self,
        model: PreTrainedModel,
        injector: KwargInjector,
        windows: Sequence[int | None],
        attention: Any,
        tap: HiddenTap | None,
    ) -> None:
        super().__init__()
        self._model, self._injector, self._windows, self._attention, self._tap = model, injector, windows, attention, tap
        self._layers = packed_layers(model)

    def forward(self, streams: list[torch.Tensor], packed: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Logits [M, V], and with a tap the hidden states of all rows, [N, width].

        `streams` is what `TracedForward._arguments` returns.
        """
        for layer, weights in zip(self._layers, packed, strict=False):
            layer.packed = weights  # packed weights are inputs, since a trace cannot hold them as constants
        tokens, positions, kept, starts, counts, *others = streams
        caches, inputs = others[:STREAMS], others[STREAMS:]
        size = len(inputs) // len(self._windows)
        by_window = {window: inputs[size * index : size * (index + 1)] for index, window in enumerate(self._windows)}
        attention = _TracedAttention(self._attention, _Streams(caches, starts, counts), by_window)
        rows = {"input_ids": tokens[None], "position_ids": positions[None]}
        with self._injector.inject({"attention": attention}, positions) as handed:
            output = self._model(**rows, use_cache=False, logits_to_keep=kept, **handed)
        return (output.logits[0],) if self._tap is None else (output.logits[0], self._tap.states)


class TracedForward:
    """Runs a traced model. Implements `outrider.verify.model.segment.ForwardBackend`. Created by `trace`."""

    max_streams = STREAMS
    max_rows = MAX_ROWS
    reads_prompts = is_invariant = False

    def __init__(self, forward: _Forward, packed: list[torch.Tensor], build: BuildInputs, example: Sequence[Segment]) -> None:
        """Traces `forward`; `example` is what it runs meanwhile."""
        self._build = build
        self._absent = torch.empty(0, dtype=example[0].cache.dtype)
        self._traced = traced(forward, (self._arguments(example), packed))
        self._packed = ScriptList(packed)

    @torch.inference_mode()
    def __call__(self, segments: Sequence[Segment]) -> torch.Tensor:
        arguments = ScriptList(self._arguments(segments))
        logits, *states = cast("tuple[torch.Tensor, ...]", run(self._traced, arguments, self._packed))
        if states:
            keep_hidden(states[0], segments)
        return logits

    def _arguments(self, segments: Sequence[Segment]) -> list[torch.Tensor]:
        """The tensors that describe the streams, in the order in which `_Forward.forward` reads them.

        They are the tokens, positions and kept rows, the streams' starts and numbers of rows, and then for each stream its
        cache, and the attention's inputs by window. A trace takes lists of one length only, so those of absent streams are
        filled up.
        """
        absent = [self._absent] * (STREAMS - len(segments))
        caches = [each.cache.tensor for each in segments] + absent
        starts = torch.tensor([each.cache.length + each.batch.known for each in segments])
        counts = torch.tensor([each.rows for each in segments])
        built = [self._build(each.cache, each.batch) for each in segments]
        by_window = ([*chain.from_iterable(tensors), *(absent * len(tensors[0]))] for tensors in zip(*built, strict=True))
        inputs = list(chain.from_iterable(by_window))
        rows = map(torch.from_numpy, (tokens_of(segments), positions_of(segments), kept_rows(segments)))
        return [*rows, starts, counts, *caches, *inputs]


def attention_masks(
    cache: TensorCache, batch: ForwardBatch, windows: Sequence[int | None], groups: int
) -> list[list[torch.Tensor]]:
    """For each window the first position that is read, int64 [], and `TorchAttention.mask`; empty if nothing is masked."""
    attention = TorchAttention(cache, batch)
    unmasked = torch.empty(0, dtype=cache.dtype)
    found = []
    for window in windows:
        mask = attention.mask(window, groups, unmasked)
        first = torch.tensor(cache.length - attention.reach(window))
        found.append([first, unmasked if mask is None else mask])
    return found


def has_experts(model: torch.nn.Module) -> bool:
    """Whether the model has MoE layers. MoE routing is data-dependent, so it cannot be traced."""
    return any("expert" in name for name, _ in model.named_modules())


def trace(
    model: PreTrainedModel,
    shape: CacheShape,
    probe: ShapeProbe,
    injector: KwargInjector,
    reference: Callable[[Sequence[Segment]], torch.Tensor],
    products: DotProducts = dot_product_attention,
    tap: HiddenTap | None = None,
) -> TracedForward | None:
    """Traces the model's forward; returns None if it cannot be traced.

    `reference` is the untraced forward, and `products` its attention. With `tap`, hidden states are kept.
    """
    if model.device.type != "cpu" or has_experts(model) or shape.recurrent is not None:
        return None
    windows = tuple(probe.windows)

    def build(cache: TensorCache, batch: ForwardBatch) -> list[list[torch.Tensor]]:
        return attention_masks(cache, batch, windows, probe.groups)

    layers = packed_layers(model)
    functions = [layer.multiply for layer in layers]
    packed = [layer.packed for layer in layers] or [torch.empty(0)]  # a trace does not accept an empty list
    cache = TensorCache(shape, max(rows + length for rows, length in CHECKS))
    cache.assume(5)
    example = [Segment(cache, ForwardBatch.chain(torch.arange(4)))]
    verbosity = logging.get_verbosity()
    try:
        with without_warnings(), torch.no_grad():
            attention = script_all(attend_by(products))
            forward = _Forward(model, injector, windows, attention, tap)
            for layer in layers:
                layer.multiply = script(layer.multiply)
            logging.set_verbosity_error()  # tracing reads every property, and some log warnings
            found = TracedForward(forward, packed, build, example)
        vocabulary = int(model.config.get_text_config().vocab_size)
        same = all(_same_logits(found, reference, segments) for segments in _checks(shape, vocabulary))
    except (_Untraceable, RuntimeError, TypeError, ValueError):
        return None
    finally:
        logging.set_verbosity(verbosity)
        for layer, weights, multiply in zip(layers, packed, functions, strict=False):
            layer.packed, layer.multiply = weights, multiply
    return found if same else None


def _checks(shape: CacheShape, vocabulary: int) -> Iterator[list[Segment]]:
    """Random tokens after random positions: of one stream, and of several."""
    several = []
    for rows, length in CHECKS:
        generator = torch.Generator().manual_seed(rows)
        cache = TensorCache(shape, rows + length)
        cache.fill(length, generator)
        tokens = torch.randint(0, vocabulary, (rows,), generator=generator)
        several.append(Segment(cache, ForwardBatch.chain(tokens), logits=rows != 2))
        yield several[-1:]
    yield several


def _same_logits(
    traced: TracedForward, reference: Callable[[Sequence[Segment]], torch.Tensor], segments: list[Segment]
) -> bool:
    """Whether both give bit-identical logits."""
    return torch.equal(traced(segments), reference(segments))
