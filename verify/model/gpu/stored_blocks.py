"""Quantised weights of files and checkpoints as blocks of a GPU's planes, with the values that they have.

A layer's integers and scales stay as they are: values of up to 4 bits, and 4-bit floats, in 4 bits, and others in 8. Values of
a grid (IQ1 to IQ3) are integers, too, of which the scale counts eighths, quarters or halves. Blocks are computed on the device
that the file's bytes are on.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from gguf import GGMLQuantizationType, quants

from outrider.verify.model.gpu.forms import Form
from outrider.verify.model.gpu.quantized import Blocks, in_words
from outrider.verify.model.stored import StoredType, Zeroed

FLOAT16, BFLOAT16, FLOAT32, WHOLE = torch.float16, torch.bfloat16, torch.float32, torch.int8
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


def spread(values: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """The `count` fields of `bits` bits of integers, the lowest first: [..., numbers] to [..., numbers, count]."""
    shifts = torch.arange(0, bits * count, bits, dtype=values.dtype, device=values.device)
    return values[..., None] >> shifts & (1 << bits) - 1


def signed(values: torch.Tensor) -> torch.Tensor:
    """Bytes with a sign as values of 8 bits."""
    return values ^ 128


def of_plain(blocks: torch.Tensor, start: int, has_minimums: bool = False) -> Parts:
    return halves(blocks[..., start:]), numbers(blocks, 0), numbers(blocks, 2) if has_minimums else None, None


def of_five(blocks: torch.Tensor, has_minimums: bool) -> Parts:
    """The fifth bits of the 32 values are those of four bytes."""
    start = 4 if has_minimums else 2
    values = halves(blocks[..., start + 4 :]) + 16 * spread(blocks[..., start : start + 4], 1, 8).flatten(-2)
    values = values + (128 if has_minimums else 128 - 16)
    return values, numbers(blocks, 0), numbers(blocks, 2) if has_minimums else None, None


def of_zeroed(blocks: torch.Tensor, bits: int) -> Parts:
    values = halves(blocks[..., 3:]) if bits == 4 else signed(blocks[..., 3:])
    return values, numbers(blocks, 0), numbers(blocks, 2, WHOLE), None


def in_table(blocks: torch.Tensor) -> torch.Tensor:
    """The values of IQ4_NL and IQ4_XS."""
    table = torch.tensor(quants.IQ4_NL.kvalues, device=blocks.device) + 128
    return table[halves(blocks).long()]


def of_table(blocks: torch.Tensor) -> Parts:
    scales = spread(blocks[..., 4:8], 4, 2).flatten(-2) + 16 * spread(numbers(blocks, 2, torch.int16), 2, 8).flatten(-2)
    factors = numbers(blocks, 0).expand(-1, -1, 2)
    return in_table(blocks[..., 8:].unflatten(-1, (8, 16))), (scales - 32).to(WHOLE), None, factors


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


def of_2_k(blocks: torch.Tensor) -> Parts:
    values = spread(blocks[..., 16:80].unflatten(-1, (2, 32)), 2, 4).mT
    scales, minimums = (each.view(WHOLE) for each in (blocks[..., :16] & 15, blocks[..., :16] >> 4))
    return values, scales, minimums, torch.cat([numbers(blocks, 80), -numbers(blocks, 82)], -1)


def of_3_k(blocks: torch.Tensor) -> Parts:
    lower, upper = spread(blocks[..., 32:96].unflatten(-1, (2, 32)), 2, 4).mT, spread(blocks[..., :32], 1, 8).mT
    scales = spread(blocks[..., 96:104], 4, 2).mT.flatten(-2) + 16 * spread(blocks[..., 104:108], 2, 4).mT.flatten(-2)
    values = lower.flatten(-3) + 4 * upper.flatten(-2) + 4
    return values, scales.view(WHOLE) - 32, None, numbers(blocks, 108).expand(-1, -1, 2)


def of_4_k(blocks: torch.Tensor) -> Parts:
    return halves(blocks[..., 16:].unflatten(-1, (4, 32))), *of_pairs(blocks)


def of_5_k(blocks: torch.Tensor) -> Parts:
    values = halves(blocks[..., 48:].unflatten(-1, (4, 32))).flatten(-2)
    return values + 16 * spread(blocks[..., 16:48], 1, 8).mT.flatten(-2) + 128, *of_pairs(blocks)


def of_6_k(blocks: torch.Tensor) -> Parts:
    lower = halves(blocks[..., :128].unflatten(-1, (2, 64)))  # [outputs, blocks, 2, 128]
    upper = spread(blocks[..., 128:192].unflatten(-1, (2, 32)), 2, 4).mT
    factor = numbers(blocks, 208)
    return lower + 16 * upper.flatten(-2) + 96, numbers(blocks, 192, WHOLE, 16), None, factor.expand(-1, -1, 2)


def of_ternary(blocks: torch.Tensor, start: int) -> Parts:
    """Values of -1, 0 and 1, and one scale, which is at `start`."""
    if start == 64:
        digits = spread(blocks[..., :64].unflatten(-1, (2, 32)), 2, 4).mT.flatten(-3)
    else:  # of base 3, the highest first, as fractions of a byte
        powers = 3 ** torch.arange(5, dtype=torch.uint8, device=blocks.device)
        parts = [
            (blocks[..., first:end, None] * powers[:count]).mT for first, end, count in ((0, 32, 5), (32, 48, 5), (48, 52, 4))
        ]
        digits = torch.cat([each.flatten(-2) for each in parts], -1).to(torch.int16) * 3 >> 8
    return digits + 7, numbers(blocks, start).expand(-1, -1, 8), None, None


def of_grid(name: str, places: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """Values with a sign: rows of a type's grid, of which bits say what is negative."""
    known: Any = getattr(quants, name)
    known.init_grid()
    found = torch.from_numpy(known.grid[0, 0]).to(places.device, torch.int16)[places.flatten(2).long()].flatten(2)
    return torch.where(spread(signs.flatten(2), 1, 8).flatten(2).bool(), -found, found)


def signs_of(places: torch.Tensor) -> torch.Tensor:
    """The signs of 8 values, of which an even number is negative, by 7 bits."""
    return torch.tensor([*quants.IQ2_XXS.ksigns], dtype=torch.uint8, device=places.device)[places.long()]


def odd(scales: torch.Tensor, factor: torch.Tensor, count: int) -> tuple[torch.Tensor, None, torch.Tensor]:
    """Scales of 2 s + 1, which count `count`-ths of a factor."""
    return (2 * scales.flatten(2) + 1).to(WHOLE), None, (factor.float() / count).expand(-1, -1, 2)


def of_words(blocks: torch.Tensor, name: str) -> Parts:
    """Of groups of 32 values; a word has a group's signs and scale."""
    if name == "IQ2_XXS":
        places, words = numbers(blocks, 2, torch.int32, 16).unflatten(-1, (8, 2)).unbind(-1)
        places, count = places.contiguous().view(torch.uint8), 8
    else:
        places, words, count = blocks[..., 2:66], numbers(blocks, 66, torch.int32, 8), 4
    values = of_grid(name, places, signs_of(spread(words, 7, 4)))
    return values + 128, *odd(words >> 28 & 15, numbers(blocks, 0), count)


def of_2_xs(blocks: torch.Tensor) -> Parts:
    words = numbers(blocks, 2, torch.int16, 32)
    values = of_grid("IQ2_XS", words & 511, signs_of(words >> 9 & 127))
    return values + 128, *odd(spread(blocks[..., 66:], 4, 2), numbers(blocks, 0), 8)


def of_2_s(blocks: torch.Tensor) -> Parts:
    places = blocks[..., 2:34].to(torch.int16) + 256 * spread(blocks[..., 66:74].to(torch.int16), 2, 4).flatten(2)
    values = of_grid("IQ2_S", places, blocks[..., 34:66])
    return values + 128, *odd(spread(blocks[..., 74:], 4, 2), numbers(blocks, 0), 8)


def of_3_s(blocks: torch.Tensor) -> Parts:
    """Values are odd, from -15 to 15."""
    places = blocks[..., 2:66].to(torch.int16) + 256 * spread(blocks[..., 66:74].to(torch.int16), 1, 8).flatten(2)
    values = of_grid("IQ3_S", places, blocks[..., 74:106])
    scales, _, factors = odd(spread(blocks[..., 106:], 4, 2), numbers(blocks, 0), 1)
    return (values + 15) // 2, scales, scales, factors * torch.tensor([2.0, -15.0], device=blocks.device)


def of_1_s(blocks: torch.Tensor) -> Parts:
    """Values are eighths, off by one to either side."""
    words = numbers(blocks, 34, torch.int16, 8)
    places = blocks[..., 2:34].to(torch.int16) + 256 * spread(words, 3, 4).flatten(2)
    values = 8 * of_grid("IQ1_S", places, torch.zeros_like(places)) + torch.where(words < 0, -1, 1).repeat_interleave(32, -1)
    return values + 128, *odd(words >> 12 & 7, numbers(blocks, 0), 8)


def of_1_m(blocks: torch.Tensor) -> Parts:
    """The same; the factor's bits are the highest ones of four words."""
    words, upper = numbers(blocks, 48, torch.int16, 4), spread(blocks[..., 32:48].to(torch.int16), 4, 2).flatten(2)
    places = blocks[..., :32].to(torch.int16) + 256 * (upper & 7)
    values = 8 * of_grid("IQ1_M", places, torch.zeros_like(places)) + (1 - (upper & 8) // 4).repeat_interleave(8, -1)
    factor = ((words >> 12 & 15) << torch.arange(0, 16, 4, dtype=torch.int16, device=blocks.device)).sum(-1, keepdim=True)
    return values + 128, *odd(spread(words, 3, 4), factor.to(torch.int16).view(FLOAT16), 8)


PAIRS, GRID = (WHOLE, WHOLE, FLOAT16), (WHOLE, None, FLOAT32)
KINDS: dict[StoredType, Kind] = {
    GGMLQuantizationType.Q4_0: Kind(32, 18, Form(4), lambda blocks: of_plain(blocks, 2)),
    GGMLQuantizationType.Q4_1: Kind(32, 20, Form(4, minimums=FLOAT16), lambda blocks: of_plain(blocks, 4, True)),
    GGMLQuantizationType.Q5_0: Kind(32, 22, Form(8), lambda blocks: of_five(blocks, False)),
    GGMLQuantizationType.Q5_1: Kind(32, 24, Form(8, minimums=FLOAT16), lambda blocks: of_five(blocks, True)),
    GGMLQuantizationType.Q8_0: Kind(32, 34, Form(8), lambda blocks: (signed(blocks[..., 2:]), numbers(blocks, 0), None, None)),
    GGMLQuantizationType.IQ4_NL: Kind(
        32, 18, Form(8), lambda blocks: (in_table(blocks[..., 2:]), numbers(blocks, 0), None, None)
    ),
    GGMLQuantizationType.IQ4_XS: Kind(256, 136, Form(8, 32, WHOLE, None, FLOAT16), of_table),
    GGMLQuantizationType.MXFP4: Kind(32, 17, Form(4, scales=BFLOAT16), of_exponents),
    GGMLQuantizationType.NVFP4: Kind(64, 36, Form(4, 16, BFLOAT16), of_float8_scales),
    GGMLQuantizationType.Q2_K: Kind(256, 84, Form(4, 16, *PAIRS), of_2_k),
    GGMLQuantizationType.Q3_K: Kind(256, 110, Form(4, 16, WHOLE, None, FLOAT16), of_3_k),
    GGMLQuantizationType.Q4_K: Kind(256, 144, Form(4, 32, *PAIRS), of_4_k),
    GGMLQuantizationType.Q5_K: Kind(256, 176, Form(8, 32, *PAIRS), of_5_k),
    GGMLQuantizationType.Q6_K: Kind(256, 210, Form(8, 16, WHOLE, None, FLOAT16), of_6_k),
    GGMLQuantizationType.IQ1_S: Kind(256, 50, Form(8, 32, *GRID), of_1_s),
    GGMLQuantizationType.IQ1_M: Kind(256, 56, Form(8, 16, *GRID), of_1_m),
    GGMLQuantizationType.IQ2_XXS: Kind(256, 66, Form(8, 32, *GRID), lambda blocks: of_words(blocks, "IQ2_XXS")),
    GGMLQuantizationType.IQ2_XS: Kind(256, 74, Form(8, 16, *GRID), of_2_xs),
    GGMLQuantizationType.IQ2_S: Kind(256, 82, Form(8, 16, *GRID), of_2_s),
    GGMLQuantizationType.IQ3_XXS: Kind(256, 98, Form(8, 32, *GRID), lambda blocks: of_words(blocks, "IQ3_XXS")),
    GGMLQuantizationType.IQ3_S: Kind(256, 110, Form(4, 32, WHOLE, WHOLE, FLOAT32), of_3_s),
    GGMLQuantizationType.TQ1_0: Kind(256, 54, Form(4), lambda blocks: of_ternary(blocks, 52)),
    GGMLQuantizationType.TQ2_0: Kind(256, 66, Form(4), lambda blocks: of_ternary(blocks, 64)),
    Zeroed.ZERO4: Kind(32, 19, Form(4, minimums=WHOLE), lambda blocks: of_zeroed(blocks, 4)),
    Zeroed.ZERO8: Kind(32, 35, Form(8, minimums=WHOLE), lambda blocks: of_zeroed(blocks, 8)),
}
