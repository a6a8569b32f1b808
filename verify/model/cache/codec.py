"""Rows of keys and values in 8 bits: one-byte values, followed by the row's scale.

A row of D values takes `stored_width(D)` bytes: the values divided by the scale, zeros up to a multiple of four, and the scale,
float32. A row's bytes depend on its own values alone, so it is decoded to the same bits in every step and draft.
"""

import torch

from outrider.verify.model.cache.shape import SCALE_BYTES, KVDtype

STORED: dict[KVDtype, torch.dtype | None] = {"auto": None, "int8": torch.int8, "fp8": torch.float8_e4m3fn}


def encode(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[..., D] to [..., stored_width(D)] of `dtype`, int8 or float8_e4m3fn; to any other data type, a conversion."""
    if (dtype != torch.int8 and dtype != torch.float8_e4m3fn) or rows.size(-1) == 0:
        return rows.to(dtype)
    largest = 127.0 if dtype == torch.int8 else 448.0  # of the type's values
    scale = rows.abs().amax(-1, keepdim=True).to(torch.float32) / largest
    # A number of the rows' data type, so that `decode` rounds once; the bound is the smallest of float16.
    scale = scale.clamp_min(2.0**-24).to(rows.dtype).to(torch.float32)
    values = (rows / scale).clamp(-largest, largest)
    if dtype == torch.int8:
        values = values.round()
    coded = torch.constant_pad_nd(values.to(dtype), [0, -rows.size(-1) % 4])
    return torch.cat([coded, torch.view_copy(scale, dtype=dtype)], -1)


def decode(stored: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
    """The inverse of `encode`: [..., D] of `dtype`, that of the rows before."""
    if stored.element_size() > 1 or width == 0:
        return stored.to(dtype)
    scale = torch.view_copy(stored[..., stored.size(-1) - 4 :], dtype=torch.float32)
    return stored[..., :width].to(dtype) * scale.to(dtype)


def noise_like(stored: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Normal noise, stored as these rows are."""
    *sizes, width = stored.shape
    values = width if stored.itemsize > 1 else max(0, width - SCALE_BYTES)
    return encode(torch.randn(*sizes, values, generator=generator, device=generator.device), stored.dtype)
