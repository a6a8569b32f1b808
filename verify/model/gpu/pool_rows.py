"""How Triton kernels read and write the pool's rows: keys and values as they are, or in 8 bits with a scale.

Computes the same as `outrider.verify.model.cache.codec`. Triton is an optional dependency: import this module lazily.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider.verify.model.cache import shape

SCALE_BYTES = tl.constexpr(shape.SCALE_BYTES)


@triton.jit
def row_width(pool, head_dim: tl.constexpr):
    """Elements of a row's values in the pool; in 8 bits, the scales of a page's rows are behind the values of all."""
    return head_dim if pool.dtype.element_ty.primitive_bitwidth > 8 else (head_dim + 3) // 4 * 4


@triton.jit
def rows_of(pool, head, head_dim: tl.constexpr, page_tokens: tl.constexpr):
    """The rows of a key head in a layer's first page."""
    scales: tl.constexpr = 0 if pool.dtype.element_ty.primitive_bitwidth > 8 else SCALE_BYTES
    return pool + head.to(tl.int64) * (page_tokens * (row_width(pool, head_dim) + scales))


@triton.jit
def _scale(page, index, head_dim: tl.constexpr, page_tokens: tl.constexpr):
    """The address of the scale of a page's row."""
    return (page + page_tokens * row_width(page, head_dim)).to(tl.pointer_type(tl.float32), bitcast=True) + index


@triton.jit
def load_rows(
    base, row, page, index, inside, dim, in_head, dtype: tl.constexpr, head_dim: tl.constexpr, page_tokens: tl.constexpr
):
    """Values of rows that begin at `row` [K] behind `base`, [K, D] of `dtype`; zeros where not `inside`.

    `page` is the address of a head's rows in the page, one or [K], and `index` [K] the rows' places in it.
    """
    stored = tl.load(base + (row[:, None] + dim[None, :]), inside[:, None] & in_head[None, :], 0)
    if base.dtype.element_ty.primitive_bitwidth > 8:
        values = stored
    else:
        scale = tl.load(_scale(page, index, head_dim, page_tokens), inside, 0.0)[:, None]
        if base.dtype.element_ty == tl.uint8:  # float8_e4m3fn, see `store_row`
            bits = stored.to(tl.uint16)
            stored = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
            scale *= 256.0
        values = (stored.to(tl.float32) * scale).to(dtype)
    return values


@triton.jit
def store_row(page, index, values, dim, head_dim: tl.constexpr, page_tokens: tl.constexpr):
    """Writes a row's values, [D], to its place in a page, as `outrider.verify.model.cache.codec.encode` rounds them."""
    in_head = dim < head_dim
    if page.dtype.element_ty.primitive_bitwidth > 8:
        stored = values
    else:
        is_int: tl.constexpr = page.dtype.element_ty == tl.int8
        largest: tl.constexpr = 127.0 if is_int else 448.0
        exact = tl.where(in_head, values.to(tl.float32), 0.0)
        scale = tl.maximum(tl.max(tl.abs(exact), 0) / largest, 2.0**-24).to(values.dtype).to(tl.float32)
        scaled = tl.minimum(tl.maximum(exact / scale, -largest), largest)
        if is_int:
            stored = tl.floor(scaled + 0.5).to(tl.int8)
        else:  # float8_e4m3fn: a float16 that is 256 times smaller, without its last seven bits
            bits = (tl.abs(scaled) / 256.0).to(tl.float16).to(tl.uint16, bitcast=True)
            stored = (((bits + 0x3F + ((bits >> 7) & 1)) >> 7) | tl.where(scaled < 0.0, 0x80, 0)).to(tl.uint8)
        tl.store(_scale(page, index, head_dim, page_tokens), scale)
    tl.store(page + index * row_width(page, head_dim) + dim, stored, in_head)
