"""Launches the kernels of tree attention over pages as one operation, which torch.compile and CUDA graphs take as it is.

Sizes follow from the model and the longest context alone, so a row has the same bits whatever a forward's number of rows or
streams is. `outrider.verify.model.attention.TorchAttention` is the reference. Triton is an optional dependency: import this
module lazily.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import triton

from outrider.verify.model.attention.interface import Layer
from outrider.verify.model.gpu import attention_kernels, writing_kernels
from outrider.verify.model.gpu.device_rows import DeviceRows
from outrider.verify.model.gpu.paged_cache import PagePool, PoolLayers
from outrider.verify.model.gpu.text_work import BLOCK, HOPPER, MIN_BLOCK_ROWS, SPLITS_PER_SIZE, attend_blocks
from outrider.verify.model.gpu.triton_products import overlap
from outrider.verify.model.transfer import on_device

# The target number of programs: several for each multiprocessor of a large GPU.
PROGRAMS = 512
# The warps of a program.
WARPS = 4
# The most keys of a block of `attend_own` on Hopper, where the next one is read ahead: with larger blocks, registers would not
# suffice for all programs for 64 rows and 8 key heads to run at once on an H100. Elsewhere, there is mostly one block.
AHEAD_KEYS = 32


class Rotation(NamedTuple):
    """How queries and keys become what is attended to."""

    angles: torch.Tensor  # float32 [positions, rotary_dim]: cosines, then sines
    positions: torch.Tensor  # int64 [N]
    query_gain: torch.Tensor | None  # [head_dim], of the norm of each head; None = there is none
    key_gain: torch.Tensor | None
    epsilon: float  # of that norm


@torch.library.custom_op("outrider::tree_attention", mutates_args=())  # undeclared, or torch.compile could copy the pool
def tree_attention(
    query: torch.Tensor,  # [heads, N, head_dim]
    key: torch.Tensor,  # [kv_heads, N, head_dim]
    value: torch.Tensor,  # [kv_heads, N, value_dim]
    keys: torch.Tensor,  # [pages, K, kv_heads, page_tokens, stored width], of a `PoolPart`; the rows are written to it
    values: torch.Tensor,  # may be the same
    rows: torch.Tensor,  # int64 [6, max_rows]; see `DeviceRows` for it and the tables
    tables: torch.Tensor,
    key_at: int,  # in `keys`
    value_at: int,
    split: int,  # positions of the first splits
    parts: int,  # the splits of the longest context
    capability: int,  # of the model's GPUs; 0 = several
    most_groups: int,  # query heads per key head of any layer, for which work was listed
    scaling: float,
    window: int,  # 0 = none
    softcap: float,  # 0 = none
    sinks: torch.Tensor | None,  # [heads]
    # The fields of `Rotation`; without angles, queries and keys are as they are.
    angles: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    query_gain: torch.Tensor | None = None,
    key_gain: torch.Tensor | None = None,
    epsilon: float = 0.0,
) -> torch.Tensor:
    """Writes the new keys and values; returns attention over the text, a row's ancestors and itself, [heads, N, value_dim]."""
    query, key, value = (each if each.stride(2) == 1 else each.contiguous() for each in (query, key, value))
    kv_heads, count, head_dim = key.shape
    page = _pages(keys[:, key_at], values[:, value_at])
    inputs: dict[str, Any] = {"rows": rows, "size": rows.shape[1], **_widths(head_dim, value.shape[2]), **overlap(query.device)}
    heads = _strided(query=query, key=key, value=value)
    turned = query if angles is None else rows_first(query, head_dim)
    rotation = {
        "query_gain": query if query_gain is None else query_gain,
        "key_gain": query if key_gain is None else key_gain,
        "has_gains": key_gain is not None,
        "angles": rows if angles is None else angles,
        "rotary_dim": 0 if angles is None else angles.shape[1],
        "positions": rows if positions is None else positions,
        "turned": turned,
        "epsilon": epsilon,
    }
    splits = {"split_keys": split, "splits_per_size": SPLITS_PER_SIZE, "parts": parts}
    shared: dict[str, Any] = {"block": BLOCK, **splits, **inputs}
    scores = {"scaling": scaling, "softcap": softcap or 1.0, "capped": softcap > 0.0, "window": window}
    with on_device(query.device):
        written = kv_heads + (0 if angles is None else len(query))
        writing_kernels.write[written, count](**heads, **rotation, **page, **inputs, kv_heads=kv_heads)
        return _attend(turned, kv_heads, most_groups, sinks, capability, tables=tables, **page, **shared, **scores)


@tree_attention.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return rows_first(query, value.shape[2])


def _pages(keys: torch.Tensor, values: torch.Tensor) -> dict[str, Any]:
    """A layer's keys and values in the pool's pages, as kernels take them."""
    is_float8 = keys.dtype == torch.float8_e4m3fn  # not all GPUs have the type
    return {
        "keys": keys.view(torch.uint8) if is_float8 else keys,
        "key_page": keys.stride(0),
        "values": values.view(torch.uint8) if is_float8 else values,
        "value_page": values.stride(0),
        "page_tokens": keys.shape[2],
    }


def _widths(key_dim: int, value_dim: int) -> dict[str, int]:
    """The widths of keys and values, and the powers of two for them."""
    padded_key, padded_value = (max(16, triton.next_power_of_2(width)) for width in (key_dim, value_dim))
    return {"key_dim": key_dim, "padded_key": padded_key, "value_dim": value_dim, "padded_value": padded_value}


def _strided(**tensors: torch.Tensor) -> dict[str, Any]:
    """Tensors [heads, N, head_dim] with their strides between heads and between rows, as kernels take them."""
    strides = {f"{name}_{of}": each.stride(at) for name, each in tensors.items() for at, of in enumerate(("head", "row"))}
    return {**tensors, **strides}


def _attend(
    query: torch.Tensor, kv_heads: int, most_groups: int, sinks: torch.Tensor | None, capability: int, **inputs: Any
) -> torch.Tensor:
    """Launches `attention_kernels.attend_text` and `attend_own`; returns the attention, [heads, N, value_dim]."""
    heads, count, head_dim = query.shape
    groups, value_dim = heads // kv_heads, inputs["value_dim"]
    # Here and not before, because torch.compile would make code of its own for the rows of each size of blocks.
    block_rows, block_keys = attend_blocks(count * most_groups, max(head_dim, value_dim), query.dtype, capability)
    parts_out = torch.empty(count, heads, inputs["parts"], value_dim, dtype=torch.float32, device=query.device)
    lse = torch.empty(count, heads, inputs["parts"], dtype=torch.float32, device=query.device)
    out, reads_ahead = rows_first(query, value_dim), capability == HOPPER and query.dtype != torch.float32
    shared = {**_strided(query=query), "parts_out": parts_out, "lse": lse, "groups": groups, **inputs}
    attention_kernels.attend_text[kv_heads, max(1, PROGRAMS // kv_heads)](
        **shared,
        block_rows=block_rows,
        block_keys=block_keys,
        num_warps=WARPS,
    )
    attention_kernels.attend_own[kv_heads, count](
        **shared,
        apart=inputs["values"].storage_offset() - inputs["keys"].storage_offset(),
        sinks=query if sinks is None else sinks,
        out=out,
        has_sinks=sinks is not None,
        own_rows=max(MIN_BLOCK_ROWS, triton.next_power_of_2(groups)),
        own_keys=min(AHEAD_KEYS, block_keys) if reads_ahead else block_keys,
        num_warps=WARPS,
        num_stages=2 if reads_ahead else 1,
    )
    return out


def rows_first(query: torch.Tensor, width: int) -> torch.Tensor:
    """An empty [heads, N, width] tensor with rows outermost in memory, the layout that the output projection reads."""
    heads, count, _ = query.shape
    return query.new_empty(count, heads, width).transpose(0, 1)


class KernelAttention:
    """Tree attention of a forward's rows over pages. Implements `outrider.verify.model.attention.Attention`."""

    def __init__(self, pool: PagePool, rows: Sequence[DeviceRows]) -> None:
        """`rows` are those of each kind of layers in the pool."""
        self.rows = {each.device: own for each, own in zip(pool.kinds, rows, strict=False)}
        self._kinds: dict[torch.device, dict[tuple[int, int, int], tuple[PoolLayers, dict[str, Any]]]] = {}
        for each, own in zip(pool.kinds, rows, strict=False):  # there are rows, but no layers, in a model without attention
            inputs = {"keys": each.keys, "values": each.values, "rows": own.rows, "tables": own.tables, **own.work.sizes}
            self._kinds.setdefault(each.device, {})[each.shape[:3]] = each, inputs

    def attend(
        self, layer: Layer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rotation: Rotation | None = None
    ) -> torch.Tensor:
        """See `Attention`; with `rotation`, queries and keys are still to be rotated."""
        kind, inputs = self._kinds[query.device][key.shape[0], key.shape[2], value.shape[2]]
        place = (layer.index - kind.first) * kind.step
        out = tree_attention(
            query=query,
            key=key,
            value=value,
            **inputs,
            key_at=kind.first_key + place,
            value_at=kind.first_value + place,
            scaling=layer.scaling,
            window=layer.window or 0,
            softcap=layer.softcap or 0.0,
            sinks=layer.sinks,
            **({} if rotation is None else rotation._asdict()),
        )
        return cast(torch.Tensor, out)

    def attend_states(self, layer: Layer, states: torch.Tensor, rotation: Rotation | None) -> torch.Tensor:
        """Of queries, keys and values side by side, [N, (heads + 2 kv_heads) * head_dim]; returns [N, heads * head_dim]."""
        [(kv_heads, head_dim, _)] = self._kinds[states.device]  # of all layers
        count = len(states)
        heads = states.view(count, -1, head_dim).transpose(0, 1)
        query, key, value = heads.split([len(heads) - 2 * kv_heads, kv_heads, kv_heads])
        return self.attend(layer, query, key, value, rotation).transpose(0, 1).reshape(count, -1)
