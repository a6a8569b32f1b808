"""Quantised weights of files and checkpoints as blocks of a GPU's planes, with the values that they have.

A layer's integers and scales stay as they are: values of up to 4 bits, and 4-bit floats, in 4 bits, and others in 8. Blocks are
computed on the device that the file's bytes are on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from gguf import GGMLQuantizationType, quants

from outrider.verify.model.gpu.forms import Form
from outrider.verify.model.gpu.quantized import Blocks, in_words
from outrider.verify.model.stored import StoredType, Zeroed

FLOAT16, BFLOAT16, WHOLE = torch.float16, torch.bfloat16, torch.int8
# Bytes of a file's blocks, uint8 [outputs, blocks, bytes], to their values, [outputs, blocks, ...], and scales, minimums, and
# pairs of factors.
Parts: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]


class Kind(NamedTuple):
    """A quantised type."""

    inputs: int  # of a block
    nbytes: int
    form: Form
    read: Callable[[torch.Tensor], Parts]


def as_blocks(rows: torch.Tensor, kind: Kind, scales: torch.Tensor | None = None) -> Blocks:
    """Rows of a file's blocks, uint8 [outputs, bytes], times `scales`, float32 [outputs]."""
    outputs, form = len(rows), kind.form
    values, units, minimums, factors = kind.read(rows.view(outputs, -1, kind.nbytes))
    values, units = values.reshape(outputs, -1, form.group), units.reshape(outputs, -1)
    minimums = None if minimums is None else minimums.reshape(outputs, -1)
    if scales is not None:
        scales = scales.view(-1, 1, 1)
        factors = scales.expand(-1, 1, 2) if factors is None else factors.float() * scales
    return in_words(values, units, minimums, form.bits, None if factors is None else factors.contiguous())


def halves(blocks: torch.Tensor) -> torch.Tensor:
    """Values of 4 bits: the lower halves of a block's bytes, and then the upper ones."""
    return torch.cat([blocks & 15, blocks >> 4], -1)


def numbers(blocks: torch.Tensor, start: int, dtype: torch.dtype = FLOAT16, count: int = 1) -> torch.Tensor:
    """Numbers within blocks, [outputs, blocks, count]."""
    return blocks[..., start : start + count * dtype.itemsize].contiguous().view(dtype)


def signed(values: torch.Tensor) -> torch.Tensor:
    """Bytes with a sign as values of 8 bits."""
    return values ^ 128


def of_plain(blocks: torch.Tensor, start: int, has_minimums: bool = False) -> Parts:
    return halves(blocks[..., start:]), numbers(blocks, 0), numbers(blocks, 2) if has_minimums else None, None


def of_five(blocks: torch.Tensor, has_minimums: bool) -> Parts:
    """The fifth bits of the 32 values are those of four bytes."""
    start = 4 if has_minimums else 2
    fifths = blocks[..., start : start + 4, None] >> torch.arange(8, dtype=torch.uint8, device=blocks.device) & 1
    values = halves(blocks[..., start + 4 :]) + 16 * fifths.flatten(-2)
    values = values + (128 if has_minimums else 128 - 16)
    return values, numbers(blocks, 0), numbers(blocks, 2) if has_minimums else None, None


def of_zeroed(blocks: torch.Tensor, bits: int) -> Parts:
    values = halves(blocks[..., 3:]) if bits == 4 else signed(blocks[..., 3:])
    return values, numbers(blocks, 0), numbers(blocks, 2, WHOLE), None


def of_table(blocks: torch.Tensor) -> Parts:
    table = torch.tensor(quants.IQ4_NL.kvalues, device=blocks.device) + 128
    return table[halves(blocks[..., 2:]).long()], numbers(blocks, 0), None, None


def of_exponents(blocks: torch.Tensor) -> Parts:
    scales = torch.exp2(blocks[..., :1].double() - 128).bfloat16()  # halved, since values are doubled
    return halves(blocks[..., 1:]), scales, None, None


def of_float8_scales(blocks: torch.Tensor) -> Parts:
    scales = blocks[..., :4]
    scales = torch.where(scales == 127, 0, scales).view(torch.float8_e4m3fn).float() / 2
    return halves(blocks[..., 4:].unflatten(-1, (4, 8))), scales.bfloat16(), None, None


def of_pairs(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scales and minimums of 6 bits, and their factors; minimums are taken off."""
    low, middle, high = blocks[..., 4:16].unflatten(-1, (3, 4)).unbind(-2)
    scales = torch.cat([low & 63, high & 15 | low >> 2 & 48], -1)
    minimums = torch.cat([middle & 63, high >> 4 | middle >> 2 & 48], -1)
    factors = torch.cat([numbers(blocks, 0), -numbers(blocks, 2)], -1)
    return scales.view(WHOLE), minimums.view(WHOLE), factors


def of_4_k(blocks: torch.Tensor) -> Parts:
    return halves(blocks[..., 16:].unflatten(-1, (4, 32))), *of_pairs(blocks)


def of_5_k(blocks: torch.Tensor) -> Parts:
    fifths = blocks[..., None, 16:48] >> torch.arange(8, dtype=torch.uint8, device=blocks.device)[:, None] & 1
    values = halves(blocks[..., 48:].unflatten(-1, (4, 32))).unflatten(-1, (2, 32)).flatten(-3, -2)
    return values + 16 * fifths + 128, *of_pairs(blocks)


def of_6_k(blocks: torch.Tensor) -> Parts:
    lower = halves(blocks[..., :128].unflatten(-1, (2, 64)))  # [outputs, blocks, 2, 128]
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)[:, None]
    upper = blocks[..., 128:192].unflatten(-1, (2, 1, 32)) >> shifts & 3
    factor = numbers(blocks, 208)
    return lower + 16 * upper.flatten(-2) + 96, numbers(blocks, 192, WHOLE, 16), None, factor.expand(-1, -1, 2)


PAIRS = (WHOLE, WHOLE, FLOAT16)
KINDS: dict[StoredType, Kind] = {
    GGMLQuantizationType.Q4_0: Kind(32, 18, Form(4), lambda blocks: of_plain(blocks, 2)),
    GGMLQuantizationType.Q4_1: Kind(32, 20, Form(4, minimums=FLOAT16), lambda blocks: of_plain(blocks, 4, True)),
    GGMLQuantizationType.Q5_0: Kind(32, 22, Form(8), lambda blocks: of_five(blocks, False)),
    GGMLQuantizationType.Q5_1: Kind(32, 24, Form(8, minimums=FLOAT16), lambda blocks: of_five(blocks, True)),
    GGMLQuantizationType.Q8_0: Kind(32, 34, Form(8), lambda blocks: (signed(blocks[..., 2:]), numbers(blocks, 0), None, None)),
    GGMLQuantizationType.IQ4_NL: Kind(32, 18, Form(8), of_table),
    GGMLQuantizationType.MXFP4: Kind(32, 17, Form(4, scales=BFLOAT16), of_exponents),
    GGMLQuantizationType.NVFP4: Kind(64, 36, Form(4, 16, BFLOAT16), of_float8_scales),
    GGMLQuantizationType.Q4_K: Kind(256, 144, Form(4, 32, *PAIRS), of_4_k),
    GGMLQuantizationType.Q5_K: Kind(256, 176, Form(8, 32, *PAIRS), of_5_k),
    GGMLQuantizationType.Q6_K: Kind(256, 210, Form(8, 16, WHOLE, None, FLOAT16), of_6_k),
    Zeroed.ZERO4: Kind(32, 19, Form(4, minimums=WHOLE), lambda blocks: of_zeroed(blocks, 4)),
    Zeroed.ZERO8: Kind(32, 35, Form(8, minimums=WHOLE), lambda blocks: of_zeroed(blocks, 8)),
}
