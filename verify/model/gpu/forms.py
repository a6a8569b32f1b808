"""Forms in which a GPU has weights of 8 or 4 bits."""

from collections.abc import Iterable
from typing import NamedTuple

import torch

# Inputs that share a scale, those whose values share words, and those that share a factor.
BLOCK, GROUP, SPAN = 32, 128, 256


class Form(NamedTuple):
    """How the weights of a layer are stored."""

    bits: int  # 8 or 4
    group: int = BLOCK  # inputs that share a scale: 32 or 16
    scales: torch.dtype = torch.float16  # int8: times factors of spans; bfloat16: of 4-bit floats
    minimums: torch.dtype | None = None  # int8: times factors of spans, or else times scales
    factors: torch.dtype | None = None

    def planes(self, outputs: int, inputs: int) -> list[tuple[torch.dtype, tuple[int, ...]]]:
        """The types and shapes of words, scales, and of minimums and factors if there are some."""
        groups = -(-inputs // GROUP)
        spans = -(-inputs // SPAN) if self.scales == torch.int8 else 1
        of_blocks = (outputs, groups * GROUP // self.group)
        found = [(torch.int16, (outputs, groups * GROUP * self.bits // 16)), (self.scales, of_blocks)]
        found += [(each, of_blocks) for each in [self.minimums] if each is not None]
        return found + [(each, (outputs, spans, 2)) for each in [self.factors] if each is not None]


INT8, INT4 = Form(8), Form(4, minimums=torch.float16)
ROUNDED = {8: INT8, 4: INT4}


def sizes_of(words: torch.Tensor, scales: torch.Tensor | None, inputs: int) -> tuple[int, int]:
    """The bits of a weight, and the inputs that share a scale; without scales, 16 bits."""
    if scales is None:
        return 16, BLOCK
    groups = -(-inputs // GROUP)
    return words.shape[1] * 16 // (groups * GROUP), groups * GROUP // scales.shape[1]


def common_form(forms: Iterable[Form]) -> Form | None:
    """A form in which weights of all of these can be stored; None if there is none."""
    found = {*forms}
    if len(found) == 1:
        return found.pop()
    scales, factors, minimums = (
        {each.scales for each in found},
        {each.factors for each in found},
        {each.minimums for each in found},
    )
    if len(scales) > 1 or len(minimums - {None}) > 1 or torch.bfloat16 in scales or (None in factors and len(factors) > 1):
        return None
    bits = 8 if len(minimums) > 1 else max(each.bits for each in found)
    widest = torch.float32 if torch.float32 in factors else factors.pop()
    return Form(bits, min(each.group for each in found), scales.pop(), next(iter(minimums - {None}), None), widest)
