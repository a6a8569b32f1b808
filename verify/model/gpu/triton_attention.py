"""Launches the kernels of tree attention over pages as one operation, which torch.compile and CUDA graphs take as it is.

Sizes follow from the model and the longest context alone, so a row has the same bits whatever a forward's number of rows or
streams is. `outrider.verify.model.attention.TorchAttention` is the reference. Triton is an optional dependency: import this
module lazily.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import triton

from outrider.verify.model.attention import Layer
from outrider.verify.model.gpu import kernels
from outrider.verify.model.gpu.device_rows import DeviceRows
from outrider.verify.model.gpu.paged_cache import PagePool
from outrider.verify.model.row_class import BLOCK
from outrider.verify.model.transfer import on_device

SPLIT_KEYS = 256  # of a split, at least: a few microseconds of one multiprocessor
MAX_SPLITS = 63  # of the longest context; with the row's own block, the parts to combine
PROGRAMS = 512  # target number of programs: several per multiprocessor of a large GPU
BLOCK_ROWS = 64  # rows of a warp group's matrix product on Hopper; fewer would read keys more often
MIN_BLOCK_ROWS = 16  # tile size of the tensor cores
LARGE_HEAD = 128  # dimensions beyond which half a block of keys fits into shared memory


def split_keys(positions: int) -> int:
    """Positions of a split, from those of the longest context."""
    return max(SPLIT_KEYS, int(triton.next_power_of_2(triton.cdiv(positions, MAX_SPLITS))))


@torch.library.custom_op("outrider::tree_attention", mutates_args=())  # undeclared, or torch.compile could copy the pool
def tree_attention(
    query: torch.Tensor,  # [heads, N, head_dim]
    key: torch.Tensor,  # [kv_heads, N, head_dim]
    value: torch.Tensor,
    pool: torch.Tensor,  # [pages, layers, 2, kv_heads, page_tokens, stored width]; the rows are written to it
    rows: torch.Tensor,  # int64 [3 + WORDS, max_rows], streams and pages as in `DeviceRows`
    streams: torch.Tensor,
    pages: torch.Tensor,
    layer: int,
    split: int,  # positions
    parts: int,  # the splits of the longest context, and one more
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
    inputs = {"rows": rows, "size": rows.shape[1], **_sizes(head_dim)}
    keys = {"key": key, "key_head": key.stride(0), "key_row": key.stride(1)}
    values = {"value": value, "value_head": value.stride(0), "value_row": value.stride(1)}
    shared: dict[str, Any] = {"streams": streams, "split_keys": split, "parts": parts, "block": BLOCK, **inputs}
    scores = {"scaling": scaling, "softcap": softcap or 1.0, "capped": softcap > 0.0, "window": window}
    with on_device(query.device):
        kernels.write[kv_heads, count](**keys, **values, **page, **inputs)
        outputs = _attend(query, kv_heads, pages=pages, **page, **shared, **scores)
        return _combine(query, *outputs, sinks, **shared)


@tree_attention.register_fake
def _(query: torch.Tensor, *_: Any) -> torch.Tensor:
    return rows_first(query)


def _sizes(head_dim: int) -> dict[str, int]:
    """The kernels' sizes of a row."""
    return {"head_dim": head_dim, "padded_dim": max(16, triton.next_power_of_2(head_dim))}


def _attend(query: torch.Tensor, kv_heads: int, **inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Launches `kernels.attend`; returns its `out` and `lse`."""
    heads, count, head_dim = query.shape
    out = torch.empty(count, heads, inputs["parts"], head_dim, dtype=torch.float32, device=query.device)
    lse = torch.empty(count, heads, inputs["parts"], dtype=torch.float32, device=query.device)
    kernels.attend[kv_heads, max(1, PROGRAMS // kv_heads)](
        query=query,
        query_head=query.stride(0),
        query_row=query.stride(1),
        out=out,
        lse=lse,
        count=count,
        groups=heads // kv_heads,
        padded_size=triton.next_power_of_2(inputs["size"]),
        block_rows=BLOCK_ROWS,
        block_keys=BLOCK if head_dim <= LARGE_HEAD else BLOCK // 2,
        own_rows=max(MIN_BLOCK_ROWS, triton.next_power_of_2(heads // kv_heads)),
        **inputs,
    )
    return out, lse


def _combine(
    query: torch.Tensor, parts_out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None, **inputs: Any
) -> torch.Tensor:
    """Launches `kernels.combine` for every row and head; returns the attention, shaped as the query."""
    heads, count, _ = query.shape
    out = rows_first(query)
    kernels.combine[count, heads](
        parts_out=parts_out,
        lse=lse,
        sinks=query if sinks is None else sinks,
        out=out,
        has_sinks=sinks is not None,
        padded_parts=triton.next_power_of_2(inputs["parts"]),
        **inputs,
    )
    return out


def rows_first(query: torch.Tensor) -> torch.Tensor:
    """An empty [heads, N, D] tensor with rows outermost in memory, the layout that the output projection reads."""
    return torch.empty_like(query.transpose(0, 1), memory_format=torch.contiguous_format).transpose(0, 1)


class KernelAttention:
    """Tree attention of a forward's rows over pages. Implements `outrider.verify.model.attention.Attention`."""

    def __init__(self, pool: PagePool, rows: Sequence[DeviceRows], positions: int) -> None:
        """`rows` are those of each of the pool's devices; `positions` is the longest context's."""
        split = split_keys(positions)
        self._by_device = {
            part.tensor.device: (
                part.first,
                {"pool": part.tensor, "rows": own.rows, "streams": own.streams, "pages": own.pages},
            )
            for part, own in zip(pool.parts, rows, strict=True)
        }
        self._splits = {"split": split, "parts": 1 + triton.cdiv(positions, split)}

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
