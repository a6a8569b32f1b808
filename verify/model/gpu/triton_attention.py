"""Tree attention on a GPU in Triton, split along the keys as in FlashDecoding.

Each program computes attention over one split of the committed prefix, unmasked except by a sliding window, for the query
heads of one key head; one more covers the N new rows, masked by ancestor bits. A second kernel combines the partial results
by log-sum-exp. The text length is read on the device, so one launch and one captured graph serve every length.
`verify.model.attention.TorchAttention` is the reference. Triton is an optional dependency: import this module lazily.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import triton
import triton.language as tl

from verify.model.attention import Layer
from verify.model.gpu.device_rows import ALIGNMENT, DeviceRows

MAX_SPLITS = 32  # of the prefix
PROGRAMS = 512  # target number of programs: several per multiprocessor of a large GPU
BLOCK_KEYS = 64
MIN_BLOCK_ROWS = 16  # tile size of the tensor cores
MAX_BLOCK_ROWS = 64
ALIGNED = tl.constexpr(ALIGNMENT)


@triton.jit
def _scores(q, k, scaling, softcap, capped: tl.constexpr):
    """Scaled scores of rows by keys, float32; soft-capped if `capped`."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scaling
    if capped:
        scores = softcap * (1.0 - 2.0 / (tl.exp(2.0 * scores / softcap) + 1.0))  # tanh(x) = 1 - 2 / (exp(2x) + 1)
    return scores


@triton.jit
def _ancestor_mask(ancestors, new, inside, depths, length, position, window: tl.constexpr):
    """Which of the `new` rows each row attends to: row 0 and its ancestors, within the sliding window if any."""
    bit = (ancestors[:, None] >> tl.maximum(new - 1, 0).to(tl.int64)[None, :]) & 1
    allowed = (new == 0)[None, :] | (bit == 1)
    if window > 0:
        depth = tl.load(depths + new, inside, 0)
        allowed = allowed & ((length + depth)[None, :] > position[:, None] - window)
    return allowed


@triton.jit
def _range(length, rows, split, splits: tl.constexpr, block_keys: tl.constexpr):
    """Positions of a split: whole blocks of the prefix or, for the last split, the new rows."""
    size = tl.cdiv(tl.cdiv(length, splits), block_keys) * block_keys
    start = tl.minimum(split * size, length)
    end = tl.minimum(start + size, length)
    if split == splits:
        start, end = length, length + rows
    return start, end


@triton.jit
def _add_block(scores, v, largest, total, summed):
    """Updates an online softmax with a block of keys: running maximum, sum of weights, weighted sum of values."""
    maximum = tl.maximum(largest, tl.max(scores, 1))
    base = tl.where(maximum == -float("inf"), 0.0, maximum)  # rows that attend to nothing so far
    weights = tl.exp(scores - base[:, None])
    rescale = tl.exp(largest - base)
    total = total * rescale + tl.sum(weights, 1)
    summed = summed * rescale[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return maximum, total, summed


@triton.jit
def _store_partial(out, lse, real, in_head, largest, total, summed):
    """Stores a split's output and log-sum-exp; no output for rows that attend to nothing in it."""
    attends = total > 0.0
    divisor = tl.where(attends, total, 1.0)
    tl.store(out, summed / divisor[:, None], (real & attends)[:, None] & in_head[None, :])
    tl.store(lse, tl.where(attends, largest + tl.log(divisor), -float("inf")), real)


@triton.jit(do_not_specialize=["rows", "groups"])
def _attend_split(
    query,  # [heads, N, D]
    query_head,  # stride between heads
    query_row,  # stride between rows
    anchor,  # base address of slot offsets
    location,  # int64 [2]; text length, and offset of the slot from the anchor in elements
    bits,  # int64 [N]; bit j: the row attends to row j + 1; all attend to row 0
    depths,  # int64 [N]; a row's position is length + its depth
    out,  # float32 [kv_heads, splits + 1, M, D], M = groups * N; not written for rows that attend to nothing
    lse,  # float32 [kv_heads, splits + 1, M]; log-sum-exp of the scores
    scaling,
    softcap,
    rows,
    groups,
    layer_offset,  # offset of the layer in the slot
    head_stride,  # between key heads
    value_offset,  # offset of a value from its key
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
    length = tl.load(location)
    keys = anchor + tl.multiple_of(tl.load(location + 1), ALIGNED) + layer_offset + head.to(tl.int64) * head_stride
    largest = tl.full([block_rows], -float("inf"), tl.float32)
    total = tl.zeros([block_rows], tl.float32)
    summed = tl.zeros([block_rows, padded_dim], tl.float32)
    position = length + tl.load(depths + node, real, 0)
    ancestors = tl.load(bits + node, real, 0)
    start, end = _range(length, rows, split, splits, block_keys)
    for begin in range(start, end, block_keys):
        at = begin + tl.arange(0, block_keys)
        inside = at < end
        element = at.to(tl.int64)[:, None] * head_dim + dim[None, :]
        k = tl.load(keys + element, inside[:, None] & in_head[None, :], 0.0)
        v = tl.load(keys + value_offset + element, inside[:, None] & in_head[None, :], 0.0)
        scores = _scores(q, k, scaling, softcap, capped)
        allowed = inside[None, :] & real[:, None]
        if split == splits:
            allowed = allowed & _ancestor_mask(ancestors, at - length, inside, depths, length, position, window)
        elif window > 0:
            allowed = allowed & (at[None, :] > position[:, None] - window)
        scores = tl.where(allowed, scores, -float("inf"))
        largest, total, summed = _add_block(scores, v, largest, total, summed)
    place = (head * (splits + 1) + split) * groups * rows + row
    _store_partial(out + place[:, None] * head_dim + dim[None, :], lse + place, real, in_head, largest, total, summed)


@triton.jit(do_not_specialize=["rows", "groups"])
def _combine(
    parts,  # float32 [kv_heads, splits + 1, M, D]
    lse,  # float32 [kv_heads, splits + 1, M]
    sinks,  # [heads]; unused without has_sinks
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
    key,  # [kv_heads, N, D]
    key_head,  # stride between heads
    key_row,  # stride between rows
    value,
    value_head,
    value_row,
    anchor,  # this and all below as in `_attend_split`
    location,
    layer_offset,
    head_stride,
    value_offset,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
):
    head, row = tl.program_id(0), tl.program_id(1)
    dim = tl.arange(0, padded_dim)
    keys = anchor + tl.multiple_of(tl.load(location + 1), ALIGNED) + layer_offset + head.to(tl.int64) * head_stride
    target = keys + (tl.load(location) + row) * head_dim + dim
    tl.store(target, tl.load(key + head * key_head + row * key_row + dim, dim < head_dim), dim < head_dim)
    tl.store(target + value_offset, tl.load(value + head * value_head + row * value_row + dim, dim < head_dim), dim < head_dim)


def _sizes(head_dim: int) -> dict[str, int]:
    """The kernels' sizes of a row."""
    return {"head_dim": head_dim, "padded_dim": max(16, triton.next_power_of_2(head_dim))}


def _attend_splits(query: torch.Tensor, kv_heads: int, **inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Launches `_attend_split` for every split, key head and block of rows; returns its `out` and `lse`."""
    heads, rows, head_dim = query.shape
    groups = heads // kv_heads
    packed = groups * rows
    block_rows = min(MAX_BLOCK_ROWS, max(MIN_BLOCK_ROWS, triton.next_power_of_2(packed)))
    row_blocks = triton.cdiv(packed, block_rows)
    splits = splits_for(kv_heads * row_blocks)
    sizes = _sizes(head_dim)
    parts = torch.empty(kv_heads, splits + 1, packed, head_dim, dtype=torch.float32, device=query.device)
    lse = torch.empty(kv_heads, splits + 1, packed, dtype=torch.float32, device=query.device)
    _attend_split[kv_heads, splits + 1, row_blocks](
        query=query,
        query_head=query.stride(0),
        query_row=query.stride(1),
        out=parts,
        lse=lse,
        rows=rows,
        groups=groups,
        splits=splits,
        block_rows=block_rows,
        block_keys=BLOCK_KEYS if sizes["padded_dim"] <= 128 else BLOCK_KEYS // 2,  # shared memory limits
        **sizes,
        **inputs,
    )
    return parts, lse


def _combine_splits(query: torch.Tensor, parts: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Launches `_combine` for every key head and packed row; returns the attention, shaped as the query."""
    kv_heads, count, packed, head_dim = parts.shape
    rows = query.shape[1]
    out = rows_first(query)
    _combine[kv_heads, packed](
        parts=parts,
        lse=lse,
        sinks=query if sinks is None else sinks,
        out=out,
        rows=rows,
        groups=packed // rows,
        has_sinks=sinks is not None,
        splits=count - 1,
        padded_splits=triton.next_power_of_2(count),
        **_sizes(head_dim),
    )
    return out


@torch.library.custom_op("outrider::tree_attention", mutates_args=())  # the slot that it writes is not an argument
def tree_attention(
    query: torch.Tensor,  # [heads, N, head_dim]
    key: torch.Tensor,  # [kv_heads, N, head_dim]
    value: torch.Tensor,
    anchor: torch.Tensor,  # any tensor of the cache's dtype on the device
    location: torch.Tensor,  # int64 [2]: text length, and offset of the slot from the anchor in elements
    bits: torch.Tensor,  # int64 [N], from `verify.model.gpu.device_rows.ancestor_bits`
    depths: torch.Tensor,  # int64 [N]
    layer_offset: int,
    head_stride: int,
    value_offset: int,
    scaling: float,
    window: int,  # 0 = none
    softcap: float,  # 0 = none
    sinks: torch.Tensor | None,  # [heads]
) -> torch.Tensor:
    """Writes the new keys and values; returns attention over the prefix, each row's ancestors and itself, [heads, N, head_dim].

    The slot is [layers, 2, kv_heads, positions, head_dim]. In elements, `layer_offset` is the layer's offset in the slot,
    `head_stride` the stride between its heads, and `value_offset` the offset of its values from its keys. N <= 65.
    """
    query, key, value = (each if each.stride(2) == 1 else each.contiguous() for each in (query, key, value))
    kv_heads, rows, head_dim = key.shape
    slot = {
        "anchor": anchor,
        "location": location,
        "layer_offset": layer_offset,
        "head_stride": head_stride,
        "value_offset": value_offset,
    }
    keys = {"key": key, "key_head": key.stride(0), "key_row": key.stride(1)}
    values = {"value": value, "value_head": value.stride(0), "value_row": value.stride(1)}
    _write[kv_heads, rows](**keys, **values, **slot, **_sizes(head_dim))
    scores = {"scaling": scaling, "softcap": softcap or 1.0, "capped": softcap > 0.0, "window": window}
    parts, lse = _attend_splits(query, kv_heads, bits=bits, depths=depths, **slot, **scores)
    return _combine_splits(query, parts, lse, sinks)


@tree_attention.register_fake
def _(query: torch.Tensor, *_: Any) -> torch.Tensor:
    return rows_first(query)


def rows_first(query: torch.Tensor) -> torch.Tensor:
    """An empty [heads, N, D] tensor with rows outermost in memory, the layout that the output projection reads."""
    return torch.empty_like(query.transpose(0, 1), memory_format=torch.contiguous_format).transpose(0, 1)


def splits_for(programs: int) -> int:
    """Splits of the prefix if each takes `programs` programs: enough to fill the device, few to combine."""
    return min(MAX_SPLITS, 1 << max(1, PROGRAMS // programs).bit_length() - 1)


class KernelAttention:
    """Tree attention of the first `count` rows in slots of `positions`. Implements `verify.model.attention.Attention`."""

    def __init__(self, rows: DeviceRows, count: int, positions: int) -> None:
        self._inputs = {
            "anchor": rows.anchor,
            "location": rows.location,
            "bits": rows.bits[:count],
            "depths": rows.depths[:count],
        }
        self._head_stride = positions * rows.shape.head_dim
        self._value_offset = rows.shape.kv_heads * self._head_stride

    def attend(self, layer: Layer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        out = tree_attention(
            query=query,
            key=key,
            value=value,
            **self._inputs,
            layer_offset=2 * layer.index * self._value_offset,
            head_stride=self._head_stride,
            value_offset=self._value_offset,
            scaling=layer.scaling,
            window=layer.window or 0,
            softcap=layer.softcap or 0.0,
            sinks=layer.sinks,
        )
        return cast(torch.Tensor, out)
