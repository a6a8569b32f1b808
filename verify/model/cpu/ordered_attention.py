"""Attention on a CPU that gives a row the same bits in a draft tree as alone, in any dtype.

A row's keys are summed in the order of its text, whatever lies between them. Text is cut into blocks of BLOCK positions:

- The blocks before the row's own are whole and committed. Flash attention sums them, with shapes that depend on the row's
  block alone.
- In the row's own block, a tree's nodes lie between the row's ancestors. There, scores and sums are matrix products in
  float32: they add key after key, and the weight of a key that is not an ancestor is zero, which changes no sum.

So a step's rows must lie in one block (`depth_left`). Both parts are combined by their log-sum-exp. Some kernels compute few
rows differently than many, so rows are padded to a `InvariantRange`; `outrider.verify.model.invariance` finds it and checks the
result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from outrider.verify.model.attention.interface import Layer
from outrider.verify.model.attention.torch_attention import flash
from outrider.verify.model.batch import ForwardBatch
from outrider.verify.model.cache.codec import decode, encode
from outrider.verify.model.cache.tensor_cache import TensorCache
from outrider.verify.model.invariant_range import BLOCK, InvariantRange, depth_left

# The sizes of a block's products are multiples of this.
WIDTH_STEP = 16


class UnorderedError(ValueError):
    """The attention cannot be computed in order."""


def pieces(batch: ForwardBatch, length: int, bounds: InvariantRange) -> Iterator[ForwardBatch]:
    """The batch in parts of one block and at most `bounds.high` rows each, for forwards one after the other.

    The parts of a prompt end with its blocks. A tree must lie in its root's block.
    """
    start = batch.known
    while start < len(batch):
        end = min(len(batch), start + bounds.high)
        if batch.ancestors is None:
            end = min(end, start + 1 + depth_left(length + start))
        yield batch.part(start, end)
        start = end


def padded(batch: ForwardBatch, count: int) -> ForwardBatch:
    """The batch with at least `count` rows to compute; those that are added attend to themselves and the text only."""
    missing = batch.known + count - len(batch)
    if missing <= 0:
        return batch
    ancestors = np.eye(len(batch) + missing, dtype=np.bool_)
    ancestors[: len(batch), : len(batch)] = batch.ancestor_mask()
    return replace(
        batch,
        tokens=np.pad(batch.tokens, (0, missing), mode="edge"),
        depths=np.pad(batch.depths, (0, missing), mode="edge"),
        ancestors=ancestors,
        padding=missing,
    )


def attend_in_order(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    length: torch.Tensor,
    inputs: list[torch.Tensor],  # of `AttentionInputs`
    scaling: float,
) -> torch.Tensor:
    """Attention of a step's rows, [heads, N, head_dim], from tensors as `outrider.verify.model.cpu.trace.attend_by`.
    Scriptable.
    """
    span, prefix_mask, block_mask, block_values = inputs
    start = int(length)
    keys[:, start : start + key.size(1)] = encode(key, keys.dtype)
    values[:, start : start + key.size(1)] = encode(value, values.dtype)
    kv_heads, head_dim = key.size(0), key.size(2)
    rows = query.size(0) // kv_heads * query.size(1)
    padding = block_mask.size(1) - rows
    packed = query.reshape(kv_heads, rows, head_dim)
    if padding > 0:
        packed = torch.constant_pad_nd(packed, [0, 0, 0, padding])
    first, cut = int(span[0]), int(span[1])
    end = cut + block_mask.size(2)
    block_keys = decode(keys[:, cut:end], head_dim, key.dtype).to(torch.float32)
    block_values[:, :, :head_dim].copy_(decode(values[:, cut:end], head_dim, value.dtype))
    scores = torch.baddbmm(block_mask, packed.to(torch.float32), block_keys.transpose(1, 2), beta=1.0, alpha=scaling)
    if cut > first:
        mask: torch.Tensor | None = None
        if prefix_mask.numel() > 0:
            mask = prefix_mask
        prefix, total = flash(packed, keys[:, first:cut], values[:, first:cut], mask, scaling)
        scores = torch.cat([total.unsqueeze(-1), scores], -1)
        weights = (scores - scores.amax(-1, keepdim=True)).exp_()
        ones = block_values.size(2) - head_dim
        of_prefix = torch.constant_pad_nd(prefix.to(torch.float32), [0, ones], 1.0) * weights[:, :, :1]
        sums = torch.baddbmm(of_prefix, weights[:, :, 1:], block_values)
    else:
        weights = (scores - scores.amax(-1, keepdim=True)).exp_()
        sums = torch.bmm(weights, block_values)
    # The values' columns from `head_dim` on are ones, so those of the sums are the total weight.
    out = sums[:, :rows, :head_dim] / sums[:, :rows, head_dim : head_dim + 1]
    return out.to(query.dtype).reshape(query.size(0), query.size(1), head_dim)


class AttentionInputs:
    """The inputs of `attend_in_order` that all layers of a forward share: per window, four tensors.

    - span: the first position of the prefix in reach, and that of the rows' own block, int64 [2]
    - prefix mask, [M, cut - first] additive, where the window's edge lies in the prefix; else empty
    - block mask, float32 [kv_heads, M, W], additive
    - block values, float32 [kv_heads, W, D]; scratch space with ones in the columns that follow the head's
    """

    def __init__(self, kv_heads: int, head_dim: int, groups: int, dtype: torch.dtype, bounds: InvariantRange) -> None:
        self._kv_heads, self._groups, self._dtype, self._bounds = kv_heads, groups, dtype, bounds
        self.least_rows = bounds.low  # the least number of rows of any product of a forward
        # Kernels compute columns that are left over in another order.
        self._scratch = torch.ones(kv_heads, 0, (head_dim // WIDTH_STEP + 1) * WIDTH_STEP)

    def build(
        self, cache: TensorCache, batch: ForwardBatch, windows: Sequence[int | None]
    ) -> dict[int | None, list[torch.Tensor]]:
        """For a batch whose rows lie in one block, by window."""
        length, known = cache.length, batch.known
        cut = (length + int(batch.depths[known:].min())) // BLOCK * BLOCK
        end = cut + -(-(length + len(batch) - cut) // WIDTH_STEP) * WIDTH_STEP
        ancestors, depths = torch.from_numpy(batch.ancestor_mask())[known:], torch.from_numpy(batch.depths)
        position = length + depths[known:]
        allowed = torch.zeros(len(ancestors), end - cut, dtype=torch.bool)
        allowed[:, : max(0, length - cut)] = True
        own = ancestors[:, max(0, cut - length) :]
        allowed[:, max(0, length - cut) :][:, : own.shape[1]] = own
        return {window: self._of_window(window, cut, allowed, position, length, depths) for window in windows}

    def _of_window(
        self, window: int | None, cut: int, allowed: torch.Tensor, position: torch.Tensor, length: int, depths: torch.Tensor
    ) -> list[torch.Tensor]:
        first, prefix_mask = 0, torch.empty(0, dtype=self._dtype)
        if window is not None and cut + BLOCK > window:
            # Depends on the block alone, as all shapes must.
            first = min(cut, max(0, cut - window + 1) // BLOCK * BLOCK)
            edge = (position - window + 1)[:, None]
            prefix_mask = self._additive(torch.arange(first, cut) >= edge, self._dtype)
            key_positions = torch.full((allowed.shape[1],), -1)
            key_positions[: max(0, length - cut)] = torch.arange(cut, max(cut, length))
            nodes = (length + depths)[max(0, cut - length) :]
            key_positions[max(0, length - cut) :][: len(nodes)] = nodes
            allowed = allowed & (key_positions >= edge)
        block_mask = self._additive(allowed, torch.float32).expand(self._kv_heads, -1, -1)
        return [torch.tensor([first, cut]), prefix_mask, block_mask, self._block_values(allowed.shape[1])]

    def _additive(self, allowed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """0 where allowed [N, K] and -inf elsewhere, for all attention rows; those that pad them attend to everything."""
        mask = torch.zeros(allowed.shape, dtype=dtype).masked_fill_(~allowed, -torch.inf).repeat(self._groups, 1)
        return torch.nn.functional.pad(mask, (0, 0, 0, self._bounds.padded_queries(len(mask)) - len(mask)))

    def _block_values(self, width: int) -> torch.Tensor:
        if width > self._scratch.shape[1]:
            self._scratch = torch.ones(self._kv_heads, width, self._scratch.shape[2])
        return self._scratch[:, :width]


class OrderedAttention:
    """Attention of one step over a cache, without a trace. Implements `outrider.verify.model.attention.Attention`."""

    def __init__(self, cache: TensorCache, batch: ForwardBatch, inputs: AttentionInputs) -> None:
        self._cache, self._batch, self._inputs = cache, batch, inputs
        self._built: dict[int | None, list[torch.Tensor]] = {}
        self._length = torch.tensor(cache.length + batch.known)

    def attend(self, layer: Layer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if layer.softcap is not None or layer.sinks is not None:
            raise UnorderedError("Soft-capped attention and sinks are not computed in order.")
        if layer.window not in self._built:
            self._built |= self._inputs.build(self._cache, self._batch, [layer.window])
        keys, values = self._cache.tensor[layer.index]
        return attend_in_order(query, key, value, keys, values, self._length, self._built[layer.window], layer.scaling)
