"""A model's forward as a TorchScript trace, which runs without Python for any number of rows and any text length.

On a CPU, a small model's forward spends as much time in Python as in its layers. The trace's logits are checked to be
bit-identical to the model's. `trace` returns None for models that cannot be traced: those with data-dependent routing, and
those whose attention uses soft-capping or sinks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, cast

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from verify.model.attention import Layer, ShapeProbe, TorchAttention
from verify.model.batch import ForwardBatch
from verify.model.cache import SPARE_POSITIONS, CacheShape, KVCache
from verify.model.cpu.ordered_attention import AttentionInputs, attend_in_order
from verify.model.cpu.packing import packed_layers

CHECKS = ((1, 3), (2, 9), (7, 0), (17, 30), (3, 70))  # rows and text length of the forwards compared


def attend(
    query: torch.Tensor,  # [heads, N, head_dim]
    key: torch.Tensor,  # [kv_heads, N, head_dim]
    value: torch.Tensor,
    keys: torch.Tensor,  # [kv_heads, positions, head_dim]; the layer's cache
    values: torch.Tensor,
    length: torch.Tensor,  # int64 []; positions written before
    inputs: list[torch.Tensor],  # the additive mask, [groups * N, length + N]; empty if nothing is masked
    scaling: float,
) -> torch.Tensor:
    """`TorchAttention.attend` as a TorchScript function: a trace would hard-code the slice bounds."""
    mask = inputs[0]
    start = int(length)
    end = start + key.size(1)
    keys[:, start:end] = key
    values[:, start:end] = value
    packed = query.reshape(key.size(0), -1, query.size(2))[None]
    all_keys, all_values = keys[:, :end][None], values[:, :end][None]
    if mask.numel() == 0:
        out = torch.nn.functional.scaled_dot_product_attention(packed, all_keys, all_values, scale=scaling)
    else:
        out = torch.nn.functional.scaled_dot_product_attention(packed, all_keys, all_values, attn_mask=mask, scale=scaling)
    return out.reshape(query.size(0), query.size(1), query.size(2))


# The attention's tensors for a batch, the same number for each window.
BuildInputs = Callable[[KVCache, ForwardBatch], list[torch.Tensor]]


class _Untraceable(Exception):
    """The model's attention is not supported in a trace."""


class _TracedAttention:
    """Calls the scripted attention while the model is traced. Implements `verify.model.attention.Attention`."""

    def __init__(
        self, script: Any, cache: torch.Tensor, length: torch.Tensor, inputs: dict[int | None, list[torch.Tensor]]
    ) -> None:
        self._script, self._cache, self._length, self._inputs = script, cache, length, inputs

    def attend(self, layer: Layer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if layer.softcap is not None or layer.sinks is not None:
            raise _Untraceable
        out = self._script(
            query=query,
            key=key,
            value=value,
            keys=self._cache[layer.index, 0],
            values=self._cache[layer.index, 1],
            length=self._length,
            inputs=self._inputs[layer.window],
            scaling=layer.scaling,
        )
        return cast(torch.Tensor, out)


class _Forward(torch.nn.Module):
    """The model as a function of tensors only."""

    def __init__(self, model: PreTrainedModel, windows: Sequence[int | None], script: Any) -> None:
        super().__init__()
        self._model, self._windows, self._script = model, windows, script
        self._layers = packed_layers(model)

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        cache: torch.Tensor,
        length: torch.Tensor,
        inputs: list[torch.Tensor],  # of the attention, by window
        packed: list[torch.Tensor],
    ) -> torch.Tensor:
        """Logits [N, V]."""
        for layer, weights in zip(self._layers, packed, strict=False):
            layer.packed = weights  # packed weights are inputs, since a trace cannot hold them as constants
        size = len(inputs) // len(self._windows)
        by_window = {window: inputs[size * index : size * (index + 1)] for index, window in enumerate(self._windows)}
        attention = _TracedAttention(self._script, cache, length, by_window)
        output = self._model(input_ids=tokens[None], position_ids=positions[None], use_cache=False, attention=attention)
        return cast(torch.Tensor, output.logits[0])


class TracedForward:
    """Runs a traced model. Implements `verify.model.runner.ForwardBackend`. Created by `trace`."""

    def __init__(self, traced: Any, packed: list[torch.Tensor], build: BuildInputs) -> None:
        self._traced, self._packed, self._build = traced, packed, build

    @torch.inference_mode()
    def __call__(self, cache: KVCache, batch: ForwardBatch) -> torch.Tensor:
        inputs = self._build(cache, batch)
        start = torch.tensor(cache.length + batch.known)
        positions = batch.positions(cache.length)
        with cast(Any, torch.jit).optimized_execution(False):  # the profiling executor would stall the first requests
            logits = self._traced(batch.tokens[batch.known :], positions, cache.tensor, start, inputs, self._packed)
        return cast(torch.Tensor, logits)


def attention_masks(cache: KVCache, batch: ForwardBatch, windows: Sequence[int | None], groups: int) -> list[torch.Tensor]:
    """`TorchAttention.mask` for each window; empty if nothing is masked."""
    attention = TorchAttention(cache, batch)
    unmasked = torch.empty(0, dtype=cache.tensor.dtype)
    masks = (attention.mask(window, groups, cache.tensor) for window in windows)
    return [unmasked if mask is None else mask for mask in masks]


def has_experts(model: PreTrainedModel) -> bool:
    """Whether the model has MoE layers. MoE routing is data-dependent, so it cannot be traced."""
    return any("expert" in name for name, _ in model.named_modules())


def trace(
    model: PreTrainedModel,
    shape: CacheShape,
    probe: ShapeProbe,
    reference: Callable[[KVCache, ForwardBatch], torch.Tensor],
    inputs: AttentionInputs | None = None,
) -> TracedForward | None:
    """Traces the model's forward; returns None if it cannot be traced.

    `reference` is the untraced forward. With `inputs`, attention is computed in order.
    """
    if model.device.type != "cpu" or has_experts(model):
        return None
    windows = tuple(probe.windows)

    def build(cache: KVCache, batch: ForwardBatch) -> list[torch.Tensor]:
        if inputs is None:
            return attention_masks(cache, batch, windows, probe.groups)
        return list(chain.from_iterable(inputs.build(cache, batch, windows).values()))

    layers = packed_layers(model)
    products = [layer.multiply for layer in layers]
    packed = [layer.packed for layer in layers] or [torch.empty(0)]  # a trace does not accept an empty list
    cache = KVCache(shape, max(rows + length for rows, length in CHECKS) + SPARE_POSITIONS)
    cache.length = 5
    example = ForwardBatch.chain(torch.arange(4))
    verbosity = logging.get_verbosity()
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore", DeprecationWarning)
            warnings.simplefilter("ignore", FutureWarning)
            forward = _Forward(model, windows, torch.jit.script(attend if inputs is None else attend_in_order))
            for layer in layers:
                layer.multiply = torch.jit.script(layer.multiply)
            positions, length = example.positions(cache.length), torch.tensor(cache.length)
            arguments = (example.tokens, positions, cache.tensor, length, build(cache, example), packed)
            logging.set_verbosity_error()  # tracing reads every property, and some log warnings
            traced = TracedForward(torch.jit.trace(forward, arguments, check_trace=False), packed, build)
        vocabulary = int(model.config.get_text_config().vocab_size)
        same = all(_same_logits(traced, reference, cache, rows, length, vocabulary) for rows, length in CHECKS)
    except (_Untraceable, RuntimeError, TypeError, ValueError):
        return None
    finally:
        logging.set_verbosity(verbosity)
        for layer, weights, multiply in zip(layers, packed, products, strict=False):
            layer.packed, layer.multiply = weights, multiply
    return traced if same else None


def _same_logits(
    traced: TracedForward,
    reference: Callable[[KVCache, ForwardBatch], torch.Tensor],
    cache: KVCache,
    rows: int,
    length: int,
    vocabulary: int,
) -> bool:
    """Whether both give bit-identical logits for `rows` random tokens after `length` random positions."""
    cache.length = length
    cache.tensor.normal_(generator=torch.Generator().manual_seed(rows))
    tokens = torch.randint(0, vocabulary, (rows,), generator=torch.Generator().manual_seed(length))
    batch = ForwardBatch.chain(tokens)
    return torch.equal(traced(cache, batch), reference(cache, batch))
