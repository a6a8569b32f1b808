"""Launches the kernels of tree attention over pages as one operation, which torch.compile and CUDA graphs take as it is.

Sizes follow from the model and the longest context alone, so a row has the same bits whatever a forward's number of rows or
streams is. `outrider.verify.model.attention.TorchAttention` is the reference. Triton is an optional dependency: import this
module lazily.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, cast

import torch
import triton

from outrider.verify.model.attention.interface import Layer
from outrider.verify.model.gpu import kernels
from outrider.verify.model.gpu.device_rows import DeviceRows
from outrider.verify.model.gpu.paged_cache import PagePool
from outrider.verify.model.invariant_range import BLOCK
from outrider.verify.model.transfer import on_device

# The first splits of a text have this many keys: a few microseconds of one multiprocessor.
SPLIT_KEYS = 256
# After each SPLITS_PER_SIZE splits, the size doubles. A text of 4,096 positions has 16 splits, one of 131,072 has 81.
SPLITS_PER_SIZE = 16
# So many parts of a row are read at once.
PARTS_AHEAD = 2
# The target number of programs: several for each multiprocessor of a large GPU.
PROGRAMS = 512
# The most rows, and the keys, of a block by the largest head dimension for which they fit into the registers and the shared
# memory of each GPU (float32 with 256 fits into few).
BLOCKS = {128: (32, BLOCK), 256: (32, 32)}
FLOAT32_BLOCKS = {64: (32, 32), 128: (16, 32), 256: (16, 16)}
# With more rows, keys are read less often. A product on Hopper takes its inputs from shared memory, which leaves registers.
HOPPER, HOPPER_BLOCKS = 90, {128: (64, BLOCK), 256: (32, 32)}
# The warps of a program. A row's own block is mostly one block of keys, so nothing is read ahead.
WARPS, OWN_STAGES = 4, 1
# The numbers of streams for which kernels are compiled; there are at most as many as rows.
STREAMS = (1, 16)
# The tile size of the tensor cores.
MIN_BLOCK_ROWS = 16


def split_count(positions: int, size: int) -> int:
    """The number of splits that the kernels make of a text of `positions` tokens. The first splits have `size` positions."""
    count = 0
    while positions > 0:
        count += min(SPLITS_PER_SIZE, triton.cdiv(positions, size))
        positions, size = positions - SPLITS_PER_SIZE * size, 2 * size
    return count


@torch.library.custom_op("outrider::tree_attention", mutates_args=())  # undeclared, or torch.compile could copy the pool
def tree_attention(
    query: torch.Tensor,  # [heads, N, head_dim]
    key: torch.Tensor,  # [kv_heads, N, head_dim]
    value: torch.Tensor,
    pool: torch.Tensor,  # [pages, layers, 2, kv_heads, page_tokens, stored width]; the rows are written to it
    rows: torch.Tensor,  # int64 [4, max_rows], streams and tables as in `DeviceRows`
    streams: torch.Tensor,
    tables: torch.Tensor,
    layer: int,
    split: int,  # positions of the first splits
    parts: int,  # the splits of the longest context
    scaling: float,
    window: int,  # 0 = none
    softcap: float,  # 0 = none
    sinks: torch.Tensor | None,  # [heads]
) -> torch.Tensor:
    """Writes the new keys and values; returns attention over the text, a row's ancestors and itself, [heads, N, head_dim]."""
    query, key, value = (each if each.stride(2) == 1 else each.contiguous() for each in (query, key, value))
    kv_heads, count, head_dim = key.shape
    page = {
        "pool": pool.view(torch.uint8) if pool.dtype == torch.float8_e4m3fn else pool,  # not all GPUs have the type
        "page_stride": pool.stride(0),
        "layer_offset": layer * pool.stride(1),
        "head_stride": pool.stride(3),
        "value_offset": pool.stride(2),
        "page_tokens": pool.shape[4],
    }
    inputs = {"rows": rows, "size": rows.shape[1], "head_dim": head_dim, "padded_dim": _padded(head_dim)}
    keys = {"key": key, "key_head": key.stride(0), "key_row": key.stride(1)}
    values = {"value": value, "value_head": value.stride(0), "value_row": value.stride(1)}
    splits = {"split_keys": split, "splits_per_size": SPLITS_PER_SIZE, "parts": parts}
    shared: dict[str, Any] = {"streams": streams, "block": BLOCK, **splits, **inputs}
    scores = {"scaling": scaling, "softcap": softcap or 1.0, "capped": softcap > 0.0, "window": window}
    with on_device(query.device):
        kernels.write[kv_heads, count](**keys, **values, **page, **inputs)
        return _attend(query, kv_heads, sinks, tables=tables, **page, **shared, **scores)


@tree_attention.register_fake
def _(query: torch.Tensor, *_: Any) -> torch.Tensor:
    return rows_first(query)


def _padded(head_dim: int) -> int:
    return int(max(16, triton.next_power_of_2(head_dim)))


def attend_blocks(rows: int, head_dim: int, dtype: torch.dtype, stored_bytes: int, capability: int) -> tuple[int, int]:
    """Rows and keys of the blocks of a split, if a stream has up to `rows` rows times query heads per key head.

    The number of rows does not change their bits. There are two, so that few variants of the kernel are compiled.
    `stored_bytes` is the size of a number in the cache.
    """
    is_roomy = capability == HOPPER and stored_bytes > 1
    blocks = FLOAT32_BLOCKS if dtype == torch.float32 else HOPPER_BLOCKS if is_roomy else BLOCKS
    most, keys = blocks[min((most for most in blocks if most >= head_dim), default=max(blocks))]
    return MIN_BLOCK_ROWS if rows <= MIN_BLOCK_ROWS else most, keys


@cache
def capability(device: torch.device) -> int:
    """The GPU's compute capability, such as 90; 0 without one."""
    major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    return 10 * major + minor


def _attend(query: torch.Tensor, kv_heads: int, sinks: torch.Tensor | None, **inputs: Any) -> torch.Tensor:
    """Launches `kernels.attend_text` and `kernels.attend_own`; returns the attention, shaped as the query."""
    heads, count, head_dim = query.shape
    groups = heads // kv_heads
    stored, gpu = inputs["pool"].itemsize, capability(query.device)
    block_rows, block_keys = attend_blocks(count * groups, head_dim, query.dtype, stored, gpu)
    parts_out = torch.empty(count, heads, inputs["parts"], head_dim, dtype=torch.float32, device=query.device)
    lse = torch.empty(count, heads, inputs["parts"], dtype=torch.float32, device=query.device)
    out = rows_first(query)
    queries = {"query": query, "query_head": query.stride(0), "query_row": query.stride(1)}
    shared = {**queries, "parts_out": parts_out, "lse": lse, "groups": groups, **inputs}
    kernels.attend_text[kv_heads, max(1, PROGRAMS // kv_heads)](
        **shared,
        most_streams=next((most for most in STREAMS if count <= most), triton.next_power_of_2(inputs["size"])),
        block_rows=block_rows,
        block_keys=block_keys,
        num_warps=WARPS,
    )
    kernels.attend_own[kv_heads, count](
        **shared,
        sinks=query if sinks is None else sinks,
        out=out,
        has_sinks=sinks is not None,
        own_rows=max(MIN_BLOCK_ROWS, triton.next_power_of_2(groups)),
        own_keys=block_keys,
        parts_ahead=PARTS_AHEAD,
        num_warps=WARPS,
        num_stages=OWN_STAGES,
    )
    return out


def rows_first(query: torch.Tensor) -> torch.Tensor:
    """An empty [heads, N, D] tensor with rows outermost in memory, the layout that the output projection reads."""
    return torch.empty_like(query.transpose(0, 1), memory_format=torch.contiguous_format).transpose(0, 1)


class KernelAttention:
    """Tree attention of a forward's rows over pages. Implements `outrider.verify.model.attention.Attention`."""

    def __init__(self, pool: PagePool, rows: Sequence[DeviceRows], positions: int) -> None:
        """`rows` are those of each of the pool's devices; `positions` is the longest context's."""
        self._by_device = {
            part.tensor.device: (
                part.first,
                {"pool": part.tensor, "rows": own.rows, "streams": own.streams, "tables": own.tables},
            )
            for part, own in zip(pool.parts, rows, strict=True)
        }
        self._splits = {"split": SPLIT_KEYS, "parts": max(1, split_count(positions, SPLIT_KEYS))}

    def attend(self, layer: Layer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        first, tensors = self._by_device[query.device]
        out = tree_attention(
            query=query,
            key=key,
            value=value,
            **tensors,
            **self._splits,
            layer=layer.index - first,
            scaling=layer.scaling,
            window=layer.window or 0,
            softcap=layer.softcap or 0.0,
            sinks=layer.sinks,
        )
        return cast(torch.Tensor, out)
