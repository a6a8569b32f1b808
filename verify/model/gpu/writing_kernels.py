"""Triton kernel that writes a forward's keys and values to their pages; queries and keys are normed and rotated on the way.

Triton is an optional dependency: import this module lazily.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider.verify.model.gpu.attention_kernels import PLACE
from outrider.verify.model.gpu.pool_rows import rows_of, store_row
from outrider.verify.model.gpu.product_kernels import enter


@triton.jit
def _turned(
    head, gain, angles, position, dim, epsilon, head_dim: tl.constexpr, rotary_dim: tl.constexpr, has_gains: tl.constexpr
):
    """A head's values, float32 [padded_dim]: normed if it has a gain, and rotated.

    Values that are rotated together lie half of `rotary_dim` apart (Su et al., RoFormer, arXiv 2104.09864, equation 34).
    """
    half: tl.constexpr = rotary_dim // 2
    rotates = dim < rotary_dim
    other = tl.where(dim < half, dim + half, dim - half)
    values = tl.load(head + dim, dim < head_dim, 0.0).to(tl.float32)
    others = tl.load(head + other, rotates, 0.0).to(tl.float32)
    if has_gains:
        scale = tl.rsqrt(tl.sum(values * values, 0) / head_dim + epsilon)
        values *= scale * tl.load(gain + dim, dim < head_dim, 0.0).to(tl.float32)
        others *= scale * tl.load(gain + other, rotates, 0.0).to(tl.float32)
    of_row = angles + position * rotary_dim + dim % half
    cosine, sine = tl.load(of_row, rotates, 1.0), tl.load(of_row + half, rotates, 0.0)
    return values * cosine + tl.where(dim < half, -others, others) * sine


@triton.jit
def _stored(
    head, gain, angles, position, dim, epsilon, head_dim: tl.constexpr, rotary_dim: tl.constexpr, has_gains: tl.constexpr
):
    """A head's values in their type: turned, or as they are if nothing is rotated."""
    if rotary_dim:
        values = _turned(head, gain, angles, position, dim, epsilon, head_dim, rotary_dim, has_gains)
        return values.to(head.dtype.element_ty)
    else:
        return tl.load(head + dim, dim < head_dim)


@triton.jit
def write(
    query,  # [heads, N, D]; this and the other arguments up to `key` are unused if nothing is rotated
    query_head,
    query_row,
    query_gain,  # [D], of the norm of each head; unused without has_gains
    key_gain,
    angles,  # float32 [positions, rotary_dim]: cosines, then sines
    positions,  # int64 [N]
    turned,  # [N, heads, D], contiguous: the rotated queries
    epsilon,
    key,  # [kv_heads, N, D]
    key_head,  # stride between heads
    key_row,  # stride between rows
    value,
    value_head,
    value_row,
    keys,  # see `attend_text` for this and all below
    values,
    rows,
    kv_heads: tl.constexpr, key_dim: tl.constexpr, padded_key: tl.constexpr, key_page: tl.constexpr,
    value_dim: tl.constexpr, padded_value: tl.constexpr, value_page: tl.constexpr,
    size: tl.constexpr, page_tokens: tl.constexpr,
    rotary_dim: tl.constexpr,  # 0 = nothing is rotated
    has_gains: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """Writes the keys and values of one row and head to the row's place; further heads are those of queries to rotate.

    It is a separate kernel because `attend_text` may read rows of the same forward: `device_rows.pieces_of` cuts long chains
    into pieces, and the text of a piece ends with the piece before.
    """
    enter(pdl)
    head, row = tl.program_id(0), tl.program_id(1)
    place = tl.load(rows + PLACE * size + row)
    dim, value_at = tl.arange(0, padded_key), tl.arange(0, padded_value)
    position = tl.load(positions + row) if rotary_dim else 0
    if head >= kv_heads:
        of_query = query + (head - kv_heads) * query_head + row * query_row
        rotated = _stored(of_query, query_gain, angles, position, dim, epsilon, key_dim, rotary_dim, has_gains)
        heads = tl.num_programs(0) - kv_heads
        target = turned + (row * heads + head - kv_heads).to(tl.int64) * key_dim + dim
        tl.store(target, rotated, dim < key_dim)
    elif place >= 0:
        page, index = place // page_tokens, place % page_tokens
        of_key, of_value = key + head * key_head + row * key_row, value + head * value_head + row * value_row
        new = _stored(of_key, key_gain, angles, position, dim, epsilon, key_dim, rotary_dim, has_gains)
        store_row(rows_of(keys, head, key_dim, page_tokens) + page * key_page, index, new, dim, key_dim, page_tokens)
        new = tl.load(of_value + value_at, value_at < value_dim)
        store_row(
            rows_of(values, head, value_dim, page_tokens) + page * value_page, index, new, value_at, value_dim, page_tokens
        )
