"""Integers with scales in groups, as blocks where these say the same, and else rounded to bfloat16. Imports no torch."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from gguf import GGMLQuantizationType, quants
from numpy.typing import NDArray

from outrider.verify.model.stored import Stored, StoredType, Zeroed

BLOCK = 32  # inputs of a block


class Computed(Stored):
    """A tensor whose rows are computed whenever they are read."""

    def __init__(
        self,
        compute: Callable[[], NDArray[np.uint8]],
        kind: StoredType,
        shape: tuple[int, int],
        mapping: mmap.mmap | None,
        scales: NDArray[np.float32] | None = None,
    ) -> None:
        fields = {"compute": compute, "type": kind, "shape": shape, "mapping": mapping, "scales": scales}
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    @property
    def rows(self) -> NDArray[np.uint8]:
        """Uint8 [rows, bytes]."""
        compute: Callable[[], NDArray[np.uint8]] = self.compute  # type: ignore[attr-defined]
        return compute()

    def take(self, places: NDArray[np.int64] | slice) -> Stored:
        """See `Stored.take`."""
        return Stored(self.rows, self.type, self.shape, scales=self.scales).take(places)


@dataclass(frozen=True, eq=False)
class Integers:
    """A layer's weights, (value - zero) * scale."""

    mapping: mmap.mmap | None
    values: Callable[[], NDArray[np.uint8]]  # [outputs, inputs]
    zeros: NDArray[np.int16]  # [outputs, groups]
    scales: NDArray[np.float32]  # the same
    bits: int
    inputs: int
    order: NDArray[np.int64] | None = None  # the group of each input, if they are not side by side

    def stored(self) -> Stored:
        """The weights, as blocks if these say the same. Blocks have scales in float16, times one in float32 for each output."""
        outputs, groups = self.scales.shape
        group, shape = self.inputs // groups, (outputs, self.inputs)
        zeros = self._least - self.zeros
        factors, halves = self._factors()
        is_exact = np.array_equal(factors[:, None] * halves.astype(np.float32), self.scales)
        fits = group * groups == self.inputs and not (group if groups > 1 else self.inputs) % BLOCK
        if not fits or self.order is not None or zeros.min() < -128 or zeros.max() > 127 or not is_exact:
            return Computed(self._floats, GGMLQuantizationType.BF16, shape, self.mapping)
        plain, zeroed = (GGMLQuantizationType.Q8_0, Zeroed.ZERO8) if self._least else (GGMLQuantizationType.Q4_0, Zeroed.ZERO4)
        kind = plain if (self.zeros == (self._least or 8)).all() else zeroed
        scales = None if (factors == 1).all() else factors
        return Computed(lambda: self._blocks(halves, zeros, kind), kind, shape, self.mapping, scales)

    @property
    def _least(self) -> int:
        """What a block has as 0, so that bytes have signs."""
        return 1 << (self.bits - 1) if self.bits > 4 else 0

    def _factors(self) -> tuple[NDArray[np.float32], NDArray[np.float16]]:
        """Outputs' scales, [outputs], and what is left for groups: powers of two if float16 has not the scales as they are."""
        with np.errstate(over="ignore"):
            halves = self.scales.astype(np.float16)
        if np.array_equal(halves, self.scales):
            return np.ones(len(halves), np.float32), halves
        factors = self.scales[:, 0]
        if self.scales.shape[1] > 1:
            factors = np.exp2(np.frexp(np.abs(self.scales).max(1))[1]).astype(np.float32)
        factors = np.where(factors == 0, np.float32(1), factors)
        return factors, (self.scales / factors[:, None]).astype(np.float16)

    def _blocks(self, halves: NDArray[np.float16], zeros: NDArray[np.int16], kind: StoredType) -> NDArray[np.uint8]:
        outputs, groups = halves.shape
        blocks = self.inputs // groups // BLOCK
        values: NDArray[np.uint8] = self.values().reshape(outputs, -1, BLOCK)
        values = np.asarray(
            values - np.uint8(self._least) if self._least else values[..., :16] | values[..., 16:] << 4, np.uint8
        )
        parts = [halves.repeat(blocks, 1)[..., None].view(np.uint8)]
        if isinstance(kind, Zeroed):
            parts.append(zeros.astype(np.int8).repeat(blocks, 1)[..., None].view(np.uint8))
        return np.concatenate([*parts, values], -1).reshape(outputs, -1)

    def _floats(self) -> NDArray[np.uint8]:
        groups = np.arange(self.inputs) * self.scales.shape[1] // self.inputs if self.order is None else self.order
        steps = self.values().astype(np.float32) - self.zeros[:, groups]
        return rounded(steps * self.scales[:, groups])


def rounded(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Rows of bfloat16."""
    found: NDArray[np.uint8] = quants.quantize(values, GGMLQuantizationType.BF16).view(np.uint8)
    return found


def unpacked(rows: NDArray[np.uint8], bits: int, count: int) -> NDArray[np.uint8]:
    """The integers of `bits` bits that bytes hold, lowest first: [rows, bytes] to [rows, count]."""
    if bits == 8:
        return rows[:, :count]
    if 8 % bits == 0:
        parts = [rows >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)]
        return np.stack(parts, -1).reshape(len(rows), -1)[:, :count]
    found = np.unpackbits(rows, axis=1, bitorder="little")[:, : count * bits].reshape(len(rows), count, bits)
    return np.packbits(found, axis=2, bitorder="little")[..., 0]
