"""Integers with scales in groups, as blocks where these say the same, and else rounded to bfloat16. Imports no torch.

Words of 32 bits hold those of GPTQ, AWQ, and compressed-tensors' `pack-quantized`. The bits of a layer's integers follow from
its tensors' shapes, so layers of one checkpoint may differ.
"""

import mmap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from gguf import GGMLQuantizationType, quants
from numpy.typing import NDArray

from outrider.verify.model.stored import Part, Stored, StoredType, Zeroed

# A layer's tensors by the ends of their names, and what the configuration says about them.
Parts: TypeAlias = Mapping[str, Stored]
Settings: TypeAlias = Mapping[str, Any]


class UnknownFormatError(ValueError):
    """A format that is not read. The message says what is not known."""


def floats(stored: Stored) -> NDArray[np.float32]:
    """Scales, of which a byte is an exponent."""
    if stored.type == Part.FLOAT8:
        return FLOAT8_VALUES[stored.rows].reshape(stored.shape)
    if stored.type == Part.UINT8:
        return np.ldexp(np.float32(1), stored.rows.astype(np.int32) - 127).reshape(stored.shape)
    return stored.floats().reshape(stored.shape)


def float8_values() -> NDArray[np.float32]:
    """The values of all bytes as float8_e4m3fn: a sign, 4 bits of exponent with a bias of 7, 3 bits of mantissa."""
    bytes_ = np.arange(256)
    exponents, mantissas = bytes_ >> 3 & 15, bytes_ & 7
    values = np.where(exponents > 0, np.ldexp(8 + mantissas, exponents - 10), np.ldexp(mantissas, -9)).astype(np.float32)
    values[bytes_ & 127 == 127] = np.nan
    found: NDArray[np.float32] = np.where(bytes_ < 128, values, -values)
    return found


FLOAT8_VALUES = float8_values()


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


# The places of outputs among the eight of a word, in AWQ.
TURNS = (0, 4, 1, 5, 2, 6, 3, 7)


def columns(words: Stored) -> NDArray[np.uint8]:
    """The bytes of each column of 32-bit words, [rows, columns] to [columns, 4 * rows]."""
    return np.ascontiguousarray(words.rows.view(np.uint32).T).view(np.uint8)


def groups_of(parts: Parts, end: str) -> NDArray[np.int64] | None:
    """The group of each input; None if groups are side by side."""
    if end not in parts:
        return None
    found = parts[end].rows.view(np.int32).reshape(-1).astype(np.int64)
    return None if np.array_equal(found, np.arange(len(found)) * (found.max() + 1) // len(found)) else found


def of_gptq(parts: Parts, settings: Settings, less: int) -> Stored:
    """Words hold inputs; those of zeros hold outputs, less one in the first version of the format."""
    words, scales = parts[".qweight"], floats(parts[".scales"])
    outputs = scales.shape[1]
    bits = bits_of(parts[".qzeros"].shape[1], outputs)
    inputs = words.shape[0] * 32 // bits
    zeros = unpacked(parts[".qzeros"].rows, bits, outputs).astype(np.int16) + less & (1 << bits) - 1
    order, scales = groups_of(parts, ".g_idx"), np.ascontiguousarray(scales.T)
    return Integers(
        words.mapping, lambda: unpacked(columns(words), bits, inputs), zeros.T, scales, bits, inputs, order
    ).stored()


def of_awq(parts: Parts, settings: Settings) -> Stored:
    """Words hold outputs, which take turns."""
    words, scales = parts[".qweight"], floats(parts[".scales"])
    bits_of(parts[".qzeros"].shape[1], scales.shape[1], (4,))

    def in_order(words: Stored) -> NDArray[np.uint8]:
        found = unpacked(words.rows, 4, 8 * words.shape[1])
        return found.reshape(len(found), -1, 8)[..., TURNS].reshape(len(found), -1).T

    zeros, scales = in_order(parts[".qzeros"]).astype(np.int16), np.ascontiguousarray(scales.T)
    return Integers(words.mapping, lambda: in_order(words), zeros, scales, 4, words.shape[0]).stored()


def of_gemv(parts: Parts, settings: Settings) -> Stored:
    """Words hold inputs, and groups are padded."""
    words, inputs = parts[".qweight"], 8 * parts[".qweight"].shape[1]
    group = settings.get("group_size", settings.get("q_group_size", 128))
    groups = 1 if group == -1 else inputs // group
    zeros = unpacked(parts[".qzeros"].rows, 4, groups).astype(np.int16)
    scales = np.ascontiguousarray(floats(parts[".scales"])[:, :groups])
    return Integers(words.mapping, lambda: unpacked(words.rows, 4, inputs), zeros, scales, 4, inputs).stored()


# Which integers words of 32 bits hold, by the method and the name of the packing.
PACKINGS: dict[tuple[str, str], Callable[[Parts, Settings], Stored]] = {
    ("gptq", "gptq"): partial(of_gptq, less=1),
    ("gptq", "gptq_v2"): partial(of_gptq, less=0),
    ("awq", "gemm"): of_awq,
    ("awq", "gemv"): of_gemv,
    ("auto-round", "auto_round:auto_gptq"): partial(of_gptq, less=1),
    ("auto-round", "auto_round:gptqmodel"): partial(of_gptq, less=0),
    ("auto-round", "auto_round"): partial(of_gptq, less=0),
    ("auto-round", "auto_round:auto_awq"): of_awq,
}


def of_words(parts: Parts, settings: Settings) -> Stored:
    """Words of 32 bits, as the method packs them."""
    method = str(settings.get("quant_method"))
    named = settings.get("checkpoint_format"), settings.get("version"), settings.get("packing_format")
    default = {"gptq": "gptq", "awq": "gemm"}.get(method, "")
    packing = "marlin" if settings.get("is_marlin_format") else str(next(filter(None, named), default)).lower()
    read = PACKINGS.get((method, packing))
    if read is None or settings.get("backend") == "llm-awq":
        raise UnknownFormatError(f"the packing {packing!r} of {method} is not known")
    return read(parts, settings)


def bits_of(words: int, count: int, known: Iterable[int] = range(2, 9)) -> int:
    """The bits of each of `count` integers in words of 32 bits. Raises UnknownFormatError."""
    bits = 32 * words // count
    if bits not in known or words != -(-count * bits // 32):
        raise UnknownFormatError(f"integers of {32 * words / count:.1f} bits are not known")
    return bits


def of_compressed(parts: Parts, settings: Settings) -> Stored:
    """Words hold inputs, and those of zeros hold outputs."""
    words, scales = parts[".weight_packed"], floats(parts[".weight_scale"])
    outputs, inputs = map(int, parts[".weight_shape"].rows.reshape(-1).view(np.int64))
    bits, zeros = bits_of(words.shape[1], inputs), np.full(scales.shape, 0, np.int16)
    zeros += 1 << (bits - 1)
    if ".weight_zero_point" in parts:
        zeros = unpacked(columns(parts[".weight_zero_point"]), bits, outputs).T.astype(np.int16)
    order = groups_of(parts, ".weight_g_idx")
    return Integers(words.mapping, lambda: unpacked(words.rows, bits, inputs), zeros, scales, bits, inputs, order).stored()
