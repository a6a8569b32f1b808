"""A model's forward without Python: traced once, then run for any number of rows and any length of text.

On a CPU a small model spends as long in Python as in its layers. A trace records the operations of one forward; ours is
made so that only sizes vary. Promises the same logits to the last bit, checked when it is made: where a model's forward
depends on its data, or has attention that is not traced (soft-capping, sinks), `trace` returns None.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from verify.model.attention import Layer, TorchAttention
from verify.model.cache import CacheShape, KVCache
from verify.model.cpu_packing import PackedLinear, multiply

CHECKS = ((1, 3), (2, 9), (7, 0), (17, 30))  # rows and text length


def attend(
    query: torch.Tensor,  # [heads, N, head_dim]
    key: torch.Tensor,  # [kv_heads, N, head_dim]
    value: torch.Tensor,
    keys: torch.Tensor,  # [kv_heads, positions, head_dim]; the layer's cache
    values: torch.Tensor,
    length: torch.Tensor,  # int64 []; positions that are written already
    mask: torch.Tensor,  # additive, [groups * N, length + N]; empty where every row sees everything
    scaling: float,
) -> torch.Tensor:
    """`TorchAttention.attend` in the part of Python that TorchScript has: a trace would fix its sizes."""
    start = int(length)
    stop = start + key.size(1)
    keys[:, start:stop] = key
    values[:, start:stop] = value
    packed = query.reshape(key.size(0), -1, query.size(2))[None]
    seen, of_seen = keys[:, :stop][None], values[:, :stop][None]
    if mask.numel() == 0:
        out = torch.nn.functional.scaled_dot_product_attention(packed, seen, of_seen, scale=scaling)
    else:
        out = torch.nn.functional.scaled_dot_product_attention(packed, seen, of_seen, attn_mask=mask, scale=scaling)
    return out.reshape(query.size(0), query.size(1), query.size(2))


class _Untraceable(Exception):
    """The model's attention is not one that is traced."""


class _TracedAttention:
    """Hands the layers of a forward that is being traced to the script. Implements `verify.model.attention.Attention`."""

    def __init__(self, script: Any, cache: torch.Tensor, length: torch.Tensor, masks: dict[int | None, torch.Tensor]) -> None:
        self._script, self._cache, self._length, self._masks = script, cache, length, masks

    def attend(self, layer: Layer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if layer.softcap is not None or layer.sinks is not None:
            raise _Untraceable
        keys, values = self._cache[layer.index, 0], self._cache[layer.index, 1]
        where = (keys, values, self._length, self._masks[layer.window])
        return cast(torch.Tensor, self._script(query, key, value, *where, layer.scaling))


class _Forward(torch.nn.Module):
    """The model as a function of tensors alone."""

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
        masks: list[torch.Tensor],
        packed: list[torch.Tensor],
    ) -> torch.Tensor:
        """Logits [N, V]."""
        for layer, weights in zip(self._layers, packed, strict=False):
            layer.packed = weights  # a trace holds no packed weights of its own
        attention = _TracedAttention(self._script, cache, length, dict(zip(self._windows, masks, strict=True)))
        output = self._model(input_ids=tokens[None], position_ids=positions[None], use_cache=False, attention=attention)
        return cast(torch.Tensor, output.logits[0])


def packed_layers(model: torch.nn.Module) -> list[PackedLinear]:
    """The packed layers in order."""
    return [module for module in model.modules() if isinstance(module, PackedLinear)]


class TracedForward:
    """Runs the trace. Made by `trace`."""

    def __init__(self, traced: Any, packed: list[torch.Tensor], windows: Sequence[int | None], groups: int) -> None:
        self._traced, self._packed, self._windows, self._groups = traced, packed, windows, groups

    @torch.inference_mode()
    def __call__(
        self, cache: KVCache, tokens: torch.Tensor, depths: torch.Tensor, ancestors: torch.Tensor | None, known: int = 0
    ) -> torch.Tensor:
        """As `ModelRunner.forward`: logits [N - known, V] of N rows after the cache's committed tokens."""
        masks = row_masks(cache, len(tokens), ancestors, self._windows, self._groups, known)
        length = torch.tensor(cache.length + known)
        positions = depths[known:] + cache.length
        with cast(Any, torch.jit).optimized_execution(False):  # its passes would stop the first requests to look for gains
            logits = self._traced(tokens[known:], positions, cache.tensor, length, masks, self._packed)
        return cast(torch.Tensor, logits)


def row_masks(
    cache: KVCache, rows: int, ancestors: torch.Tensor | None, windows: Sequence[int | None], groups: int, known: int = 0
) -> list[torch.Tensor]:
    """A mask for each window, empty where there is none."""
    attention = TorchAttention(cache, rows, ancestors, known)
    nothing = torch.empty(0, dtype=cache.tensor.dtype)
    found = (attention.mask(window, groups, cache.tensor) for window in windows)
    return [nothing if mask is None else mask for mask in found]


def has_experts(model: PreTrainedModel) -> bool:
    """Which of its layers compute depends on the data, so no recording of one forward serves for others."""
    return any("expert" in name for name, _ in model.named_modules())


def trace(
    model: PreTrainedModel,
    shape: CacheShape,
    windows: Sequence[int | None],
    groups: int,
    reference: Callable[[KVCache, torch.Tensor], torch.Tensor],
) -> TracedForward | None:
    """Traces the model's forward, or returns None. `reference` is the untraced forward over a chain of tokens."""
    if model.device.type != "cpu" or has_experts(model):
        return None
    layers = packed_layers(model)
    packed = [layer.packed for layer in layers] or [torch.empty(0)]  # a trace takes no empty list
    cache = KVCache(shape, max(rows + length for rows, length in CHECKS))
    cache.tensor.zero_()
    cache.length = 5
    example = torch.arange(4)
    masks = row_masks(cache, len(example), None, windows, groups)
    verbosity = logging.get_verbosity()
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore", DeprecationWarning)
            warnings.simplefilter("ignore", FutureWarning)
            forward = _Forward(model, windows, torch.jit.script(attend))
            product = torch.jit.script(multiply)
            for layer in layers:
                layer.multiply = product
            inputs = (example, example + cache.length, cache.tensor, torch.tensor(cache.length), masks, packed)
            logging.set_verbosity_error()  # tracing looks at every property, and some complain
            traced = TracedForward(torch.jit.trace(forward, inputs, check_trace=False), packed, windows, groups)
        same = all(_same(traced, reference, cache, rows, length, model) for rows, length in CHECKS)
    except (_Untraceable, RuntimeError, TypeError, ValueError):
        return None
    finally:
        logging.set_verbosity(verbosity)
        for layer, weights in zip(layers, packed, strict=False):
            layer.packed, layer.multiply = weights, multiply
    return traced if same else None


def _same(
    traced: TracedForward,
    reference: Callable[[KVCache, torch.Tensor], torch.Tensor],
    cache: KVCache,
    rows: int,
    length: int,
    model: PreTrainedModel,
) -> bool:
    """The trace says what the model says, to the last bit, for so many random tokens."""
    cache.length = length
    cache.tensor.normal_(generator=torch.Generator().manual_seed(rows))
    vocabulary = int(model.config.get_text_config().vocab_size)
    tokens = torch.randint(0, vocabulary, (rows,), generator=torch.Generator().manual_seed(length))
    expected = reference(cache, tokens)
    return torch.equal(traced(cache, tokens, torch.arange(rows), None), expected)
