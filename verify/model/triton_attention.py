"""Tree attention on a GPU, in Triton: the prefix split over the whole device, then the draft's own rows, then one combination.

Each program reads a part of the committed prefix, which every row sees (no mask), for the query heads that share one key head;
one more reads the N new rows under the ancestor bits. Their parts are combined by log-sum-exp. The text's length is read on the
device, so one launch, and one captured graph, serves every length. `verify.model.attention.TorchAttention` is the reference.
Imported only where it is used: Triton is no base dependency.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import triton
import triton.language as tl

from verify.model.attention import Layer
from verify.model.cache import CacheShape, KVCache
from verify.model.transfer import to_device

MOST_SPLITS = 32  # parts of the prefix
PROGRAMS = 512  # that are wanted at least, some for each of a large GPU's processors
BLOCK_KEYS = 64
LEAST_ROWS = 16  # what a tensor core multiplies at once
MOST_ROWS = 64
ALIGNED = tl.constexpr(16)  # elements; loads of this many at once need to know it


@triton.jit
def _scores(q, k, scaling, softcap, capped: tl.constexpr):
    """Rows by keys, float32; with `capped`, bounded by the softcap."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scaling
    if capped:
        scores = softcap * (1.0 - 2.0 / (tl.exp(2.0 * scores / softcap) + 1.0))  # tanh(x) = 1 - 2 / (exp(2x) + 1)
    return scores


@triton.jit
def _ancestor(seen, new, inside, depths, length, position, window: tl.constexpr):
    """Which of the `new` rows each row sees: row 0, and those whose bits are set; in the window, where there is one."""
    bit = (seen[:, None] >> tl.maximum(new - 1, 0).to(tl.int64)[None, :]) & 1
    allowed = (new == 0)[None, :] | (bit == 1)
    if window > 0:  # a new row's position is its depth's
        depth = tl.load(depths + new, inside, 0)
        allowed = allowed & ((length + depth)[None, :] > position[:, None] - window)
    return allowed


@triton.jit
def _range(length, rows, split, splits: tl.constexpr, block_keys: tl.constexpr):
    """The positions that a split reads: a part of the prefix in whole blocks, or the new rows."""
    part = tl.cdiv(tl.cdiv(length, splits), block_keys) * block_keys
    start = tl.minimum(split * part, length)
    stop = tl.minimum(start + part, length)
    if split == splits:
        start, stop = length, length + rows
    return start, stop


@triton.jit
def _add_block(scores, v, largest, total, summed):
    """One block of keys more in a running softmax: its maximum, its sum of weights, and the weighted sum of values."""
    most = tl.maximum(largest, tl.max(scores, 1))
    base = tl.where(most == -float("inf"), 0.0, most)  # a row that sees nothing so far
    weights = tl.exp(scores - base[:, None])
    shrink = tl.exp(largest - base)
    total = total * shrink + tl.sum(weights, 1)
    summed = summed * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return most, total, summed


@triton.jit
def _store_part(out, lse, real, in_head, largest, total, summed):
    """What a part came to; no values where a row saw nothing."""
    saw = total > 0.0
    held = tl.where(saw, total, 1.0)
    tl.store(out, summed / held[:, None], (real & saw)[:, None] & in_head[None, :])
    tl.store(lse, tl.where(saw, largest + tl.log(held), -float("inf")), real)


@triton.jit(do_not_specialize=["rows", "groups"])
def _attend_part(
    query,  # [heads, N, D]; elements from one head to the next, and from row to row
    query_head,
    query_row,
    anchor,  # a place in memory that the slot's is counted from
    where,  # int64 [2]; committed positions, and elements from the anchor to the slot
    bits,  # int64 [N]; bit j = the row sees row j + 1; all see row 0
    depths,  # int64 [N]; a row's position is length + its depth
    out,  # float32 [kv_heads, splits + 1, M, D]; nothing is written where a row sees nothing
    lse,  # float32 [kv_heads, splits + 1, M]; log-sum-exp of the scores
    scaling,
    softcap,
    rows,
    groups,
    layer_at,  # elements from the slot to the layer
    head_stride,  # from one key head to the next
    values_at,  # from a key to its value
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    window: tl.constexpr,  # 0 = none
    capped: tl.constexpr,
    splits: tl.constexpr,
    block_rows: tl.constexpr,
    block_keys: tl.constexpr,
):
    head, split = tl.program_id(0), tl.program_id(1)
    row = tl.program_id(2) * block_rows + tl.arange(0, block_rows)  # packed: group * N + row
    real, node = row < groups * rows, row % rows
    dim = tl.arange(0, padded_dim)
    in_head = dim < head_dim
    place = (head * groups + row // rows) * query_head + node * query_row
    q = tl.load(query + place[:, None] + dim[None, :], real[:, None] & in_head[None, :], 0.0)
    length = tl.load(where)
    keys = anchor + tl.multiple_of(tl.load(where + 1), ALIGNED) + layer_at + head.to(tl.int64) * head_stride
    largest = tl.full([block_rows], -float("inf"), tl.float32)
    total = tl.zeros([block_rows], tl.float32)
    summed = tl.zeros([block_rows, padded_dim], tl.float32)
    position = length + tl.load(depths + node, real, 0)
    seen = tl.load(bits + node, real, 0)
    start, stop = _range(length, rows, split, splits, block_keys)
    for begin in range(start, stop, block_keys):
        at = begin + tl.arange(0, block_keys)
        inside = at < stop
        element = at.to(tl.int64)[:, None] * head_dim + dim[None, :]
        k = tl.load(keys + element, inside[:, None] & in_head[None, :], 0.0)
        v = tl.load(keys + values_at + element, inside[:, None] & in_head[None, :], 0.0)
        scores = _scores(q, k, scaling, softcap, capped)
        allowed = inside[None, :] & real[:, None]
        if split == splits:
            allowed = allowed & _ancestor(seen, at - length, inside, depths, length, position, window)
        elif window > 0:
            allowed = allowed & (at[None, :] > position[:, None] - window)
        scores = tl.where(allowed, scores, -float("inf"))
        largest, total, summed = _add_block(scores, v, largest, total, summed)
    place = (head * (splits + 1) + split) * groups * rows + row
    _store_part(out + place[:, None] * head_dim + dim[None, :], lse + place, real, in_head, largest, total, summed)


@triton.jit(do_not_specialize=["rows", "groups"])
def _combine(
    parts,  # float32 [kv_heads, splits + 1, M, D]
    lse,  # float32 [kv_heads, splits + 1, M]
    sinks,  # [heads], or anything where there are none
    out,  # [N, heads, D], contiguous
    rows,
    groups,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    has_sinks: tl.constexpr,
    splits: tl.constexpr,
    padded_splits: tl.constexpr,
):
    head, row = tl.program_id(0), tl.program_id(1)
    packed = groups * rows
    split = tl.arange(0, padded_splits)
    place = (head * (splits + 1) + split) * packed + row
    scores = tl.load(lse + place, split <= splits, -float("inf"))
    largest = tl.max(scores, 0)
    if has_sinks:
        sink = tl.load(sinks + head * groups + row // rows).to(tl.float32)
        largest = tl.maximum(largest, sink)
    weights = tl.exp(scores - largest)
    total = tl.sum(weights, 0)
    if has_sinks:
        total += tl.exp(sink - largest)
    dim = tl.arange(0, padded_dim)
    mask = (scores > -float("inf"))[:, None] & (dim < head_dim)[None, :]
    part = tl.load(parts + place[:, None] * head_dim + dim[None, :], mask, 0.0)
    mixed = tl.sum(part * weights[:, None], 0) / total
    place = (row % rows) * tl.num_programs(0) * groups + head * groups + row // rows
    tl.store(out + place * head_dim + dim, mixed.to(out.dtype.element_ty), dim < head_dim)


@triton.jit
def _write(
    key,  # [kv_heads, N, D]; elements from one head to the next, and from row to row
    key_head,
    key_row,
    value,
    value_head,
    value_row,
    anchor,  # as for `_attend_part`
    where,
    layer_at,
    head_stride,
    values_at,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
):
    head, row = tl.program_id(0), tl.program_id(1)
    dim = tl.arange(0, padded_dim)
    keys = anchor + tl.multiple_of(tl.load(where + 1), ALIGNED) + layer_at + head.to(tl.int64) * head_stride
    target = keys + (tl.load(where) + row) * head_dim + dim
    tl.store(target, tl.load(key + head * key_head + row * key_row + dim, dim < head_dim), dim < head_dim)
    tl.store(target + values_at, tl.load(value + head * value_head + row * value_row + dim, dim < head_dim), dim < head_dim)


@torch.library.custom_op("outrider::tree_attention", mutates_args=())  # writes memory that no argument stands for
def tree_attention(
    query: torch.Tensor,  # [heads, N, head_dim]
    key: torch.Tensor,  # [kv_heads, N, head_dim]
    value: torch.Tensor,
    anchor: torch.Tensor,  # any tensor of the cache's dtype on the device
    where: torch.Tensor,  # int64 [2]: committed positions, and elements from the anchor to the slot
    bits: torch.Tensor,  # int64 [N], as `ancestor_bits` gives them
    depths: torch.Tensor,  # int64 [N]
    layer_at: int,
    head_stride: int,
    values_at: int,
    scaling: float,
    window: int,  # 0 = none
    softcap: float,  # 0 = none
    sinks: torch.Tensor | None,  # [heads]
) -> torch.Tensor:
    """Writes the new keys and values; what each row reads from the prefix, its ancestors and itself: [heads, N, head_dim].

    The slot is [layers, 2, kv_heads, positions, head_dim]; the three distances are those from it to the layer, between its
    heads, and from its keys to its values, in elements. N <= 65.
    """
    query, key, value = (given if given.stride(2) == 1 else given.contiguous() for given in (query, key, value))
    heads, rows, head_dim = query.shape
    kv_heads = key.shape[0]
    groups = heads // kv_heads
    packed = groups * rows
    block_rows = min(MOST_ROWS, max(LEAST_ROWS, triton.next_power_of_2(packed)))
    row_blocks = triton.cdiv(packed, block_rows)
    splits = splits_for(kv_heads * row_blocks)
    padded_dim = max(16, triton.next_power_of_2(head_dim))
    sizes: dict[str, Any] = {"head_dim": head_dim, "padded_dim": padded_dim}
    slot = (layer_at, head_stride, values_at)
    _write[kv_heads, rows](key, *key.stride()[:2], value, *value.stride()[:2], anchor, where, *slot, **sizes)
    parts = torch.empty(kv_heads, splits + 1, packed, head_dim, dtype=torch.float32, device=query.device)
    lse = torch.empty(kv_heads, splits + 1, packed, dtype=torch.float32, device=query.device)
    _attend_part[kv_heads, splits + 1, row_blocks](
        *(query, *query.stride()[:2], anchor, where, bits, depths, parts, lse, scaling, softcap or 1.0, rows, groups, *slot),
        **sizes,
        window=window,
        capped=softcap > 0.0,
        splits=splits,
        block_rows=block_rows,
        block_keys=BLOCK_KEYS if padded_dim <= 128 else BLOCK_KEYS // 2,  # of a large head, fewer keys fit
    )
    out = rows_first(query)
    _combine[kv_heads, packed](
        *(parts, lse, query if sinks is None else sinks, out, rows, groups),
        **sizes,
        has_sinks=sinks is not None,
        splits=splits,
        padded_splits=triton.next_power_of_2(splits + 1),
    )
    return out


@tree_attention.register_fake
def _(query: torch.Tensor, *_: Any) -> torch.Tensor:
    return rows_first(query)


def rows_first(query: torch.Tensor) -> torch.Tensor:
    """Room for [heads, N, D], laid out row by row, as the layer's next multiplication wants it."""
    return torch.empty_like(query.transpose(0, 1), memory_format=torch.contiguous_format).transpose(0, 1)


def splits_for(programs: int) -> int:
    """Parts of the prefix where each is read by so many programs: enough to busy the device, few to be combined."""
    return min(MOST_SPLITS, 1 << max(1, PROGRAMS // programs).bit_length() - 1)


class DeviceRows:
    """What a launch is told in the device's memory: which slot, how long its text is, and how its rows are related."""

    def __init__(self, shape: CacheShape, most: int) -> None:
        """For up to `most` rows over slots of `shape`."""
        self.shape = shape
        self.anchor = torch.empty(ALIGNED.value, dtype=shape.dtype, device=shape.device)
        self._all = torch.zeros(2 + 3 * most, dtype=torch.int64, device=shape.device)
        self.where = self._all[:2]
        self.tokens, self.depths, self.bits = self._all[2:].view(3, most)

    def set(self, cache: KVCache, tokens: torch.Tensor, depths: torch.Tensor, ancestors: torch.Tensor | None) -> None:
        """Takes N rows, given on the host, over with one copy. Further rows see the prefix and row 0, and nobody sees them."""
        apart = cache.tensor.data_ptr() - self.anchor.data_ptr()
        told = torch.zeros(len(self._all), dtype=torch.int64)
        told[0] = cache.length
        told[1] = apart // self.shape.dtype.itemsize
        rows = told[2:].view(3, -1)
        rows[0, : len(tokens)] = tokens
        rows[1, : len(tokens)] = depths
        if ancestors is not None:
            rows[2, : len(tokens)] = ancestor_bits(ancestors)
        self._all.copy_(to_device(told, self.shape.device))


class KernelAttention:
    """Tree attention of the first `count` of `rows`, in slots of `positions`. Implements `verify.model.attention.Attention`."""

    def __init__(self, rows: DeviceRows, count: int, positions: int) -> None:
        self._rows = (rows.anchor, rows.where, rows.bits[:count], rows.depths[:count])
        self._head_stride = positions * rows.shape.head_dim
        self._values_at = rows.shape.kv_heads * self._head_stride

    def attend(self, layer: Layer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        distances = (2 * layer.index * self._values_at, self._head_stride, self._values_at)
        options = (layer.scaling, layer.window or 0, layer.softcap or 0.0, layer.sinks)
        return cast(torch.Tensor, tree_attention(query, key, value, *self._rows, *distances, *options))


def ancestor_bits(ancestors: torch.Tensor) -> torch.Tensor:
    """bool [N, N] (a row sees itself and its ancestors) as int64 [N]: bit j stands for row j + 1, row 0 needs none. N <= 65."""
    powers = torch.ones(1, dtype=torch.int64, device=ancestors.device) << torch.arange(
        len(ancestors) - 1, device=ancestors.device
    )
    return (ancestors[:, 1:] * powers).sum(1)
