"""Quantised weights of checkpoints as one tensor for each layer: GPTQ, AWQ, compressed-tensors' packed integers, and float8.

Integers of 4 and 8 bits whose inputs have scales in groups are repacked as blocks, which loses nothing. Others are unpacked and
rounded to bfloat16. Both happen when a tensor's rows are read. Imports no torch.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, quants
from numpy.typing import NDArray

from outrider.verify.model.stored import Stored, StoredType, Zeroed

BLOCK = 32  # inputs of a block
METHODS = {"gptq", "awq", "compressed-tensors", "fp8"}
# The ends of tensors' names that belong to one layer, the values first.
GPTQ = (".qweight", ".qzeros", ".scales", ".g_idx")
COMPRESSED = (".weight_packed", ".weight_scale", ".weight_zero_point", ".weight_shape", ".weight_g_idx")
FLOAT8 = (".weight_scale_inv",)
# The places of outputs among the eight of a word, in AWQ.
TURNS = (0, 4, 1, 5, 2, 6, 3, 7)


class Computed(Stored):
    """A tensor whose rows are computed whenever they are read."""

    def __init__(
        self, compute: Callable[[], NDArray[np.uint8]], kind: StoredType, shape: tuple[int, int], mapping: mmap.mmap | None
    ) -> None:
        for name, value in {"compute": compute, "type": kind, "shape": shape, "mapping": mapping}.items():
            object.__setattr__(self, name, value)

    @property
    def rows(self) -> NDArray[np.uint8]:
        """Uint8 [rows, bytes]."""
        compute: Callable[[], NDArray[np.uint8]] = self.compute  # type: ignore[attr-defined]
        return compute()

    def take(self, places: NDArray[np.int64] | slice) -> Stored:
        """See `Stored.take`."""
        return Stored(self.rows, self.type, self.shape).take(places)


@dataclass(frozen=True, eq=False)
class Integers:
    """A layer's weights, (value - zero) * scale."""

    words: Stored
    values: Callable[[], NDArray[np.uint8]]  # [outputs, inputs], of the words
    zeros: NDArray[np.int16]  # [outputs, groups]
    scales: NDArray[np.float32]  # the same
    bits: int
    inputs: int
    order: NDArray[np.int64] | None = None  # the group of each input, if they are not side by side

    def stored(self) -> Stored:
        """The weights, as blocks if these say the same."""
        outputs, groups = self.scales.shape
        group, half, shape = self.inputs // groups, 1 << (self.bits - 1), (outputs, self.inputs)
        fits = group * groups == self.inputs and not group % BLOCK and np.abs(self.zeros - half).max() < half + (self.bits == 4)
        with np.errstate(over="ignore"):
            halves = self.scales.astype(np.float16)
        if not fits or self.order is not None or not np.array_equal(halves, self.scales):
            return Computed(self._floats, GGMLQuantizationType.BF16, shape, self.words.mapping)
        plain = {4: GGMLQuantizationType.Q4_0, 8: GGMLQuantizationType.Q8_0}[self.bits]
        zeroed = {4: Zeroed.ZERO4, 8: Zeroed.ZERO8}[self.bits]
        kind = plain if (self.zeros == half).all() else zeroed
        return Computed(lambda: self._blocks(halves, kind), kind, shape, self.words.mapping)

    def _blocks(self, halves: NDArray[np.float16], kind: StoredType) -> NDArray[np.uint8]:
        outputs, groups = halves.shape
        blocks = self.inputs // groups // BLOCK
        values: NDArray[np.uint8] = self.values().reshape(outputs, -1, BLOCK)
        least = 128 if self.bits == 8 else 0  # of what a block has as 0
        values = np.asarray(values ^ 128 if least else values[..., :16] | values[..., 16:] << 4, np.uint8)
        parts = [halves.repeat(blocks, 1)[..., None].view(np.uint8)]
        if isinstance(kind, Zeroed):
            parts.append((least - self.zeros).astype(np.int8).repeat(blocks, 1)[..., None].view(np.uint8))
        return np.concatenate([*parts, values], -1).reshape(outputs, -1)

    def _floats(self) -> NDArray[np.uint8]:
        groups = np.arange(self.inputs) * self.scales.shape[1] // self.inputs if self.order is None else self.order
        steps = self.values().astype(np.float32) - self.zeros[:, groups]
        return rounded(steps * self.scales[:, groups])


def rounded(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Rows of bfloat16."""
    found: NDArray[np.uint8] = quants.quantize(values, GGMLQuantizationType.BF16).view(np.uint8)
    return found


def unpacked(words: Stored, bits: int) -> NDArray[np.uint8]:
    """The integers of `bits` bits that 32-bit words hold, lowest first: [rows, words] to [rows, words * 32 / bits]."""
    values = words.rows
    return values if bits == 8 else np.stack([values & 15, values >> 4], -1).reshape(len(values), -1)


def floats(stored: Stored) -> NDArray[np.float32]:
    return stored.floats().reshape(stored.shape)


def whole_layers(tensors: Mapping[str, Stored], settings: Mapping[str, Any]) -> dict[str, Stored] | None:
    """The tensors with one for each layer; None if the checkpoint's `quantization_config` says something else.

    Raises KeyError, ValueError, and IndexError for tensors that do not belong together.
    """
    method = str(settings.get("quant_method"))
    read = {"gptq": of_gptq, "awq": of_awq, "compressed-tensors": of_compressed, "fp8": of_float8}.get(method)
    ends = {"compressed-tensors": COMPRESSED, "fp8": FLOAT8}.get(method, GPTQ)
    weights = dict(settings)
    if method == "compressed-tensors":
        groups = settings.get("config_groups") or {}
        if settings.get("format") != "pack-quantized" or len(groups) != 1:
            return None
        weights = next(iter(groups.values())).get("weights") or {}
    bits = 8 if method == "fp8" else weights.get("bits", weights.get("num_bits"))
    if read is None or bits not in (4, 8) or settings.get("dynamic"):
        return None
    if (method == "awq" and (bits, settings.get("version", "gemm")) != (4, "gemm")) or (
        method,
        weights.get("weight_block_size"),
    ) == ("fp8", None):
        return None
    found = {name: each for name, each in tensors.items() if not name.endswith(ends)}
    for name in tensors:
        if name.endswith(ends[0]):
            layer = name.removesuffix(ends[0])
            known = {end: tensors[layer + end] for end in (*ends, ".weight") if layer + end in tensors}
            found[f"{layer}.weight"] = read(known, weights, bits)
    return found if any(name.endswith(ends[0]) for name in tensors) else None


def of_gptq(known: Mapping[str, Stored], settings: Mapping[str, Any], bits: int) -> Stored:
    """Words hold inputs; those of zeros hold outputs, less one unless the format is the second one."""
    words, scales = known[".qweight"], floats(known[".scales"])
    inputs, outputs = words.shape[0] * 32 // bits, words.shape[1]
    zeros = unpacked(known[".qzeros"], bits).astype(np.int16)
    if settings.get("checkpoint_format") != "gptq_v2":
        zeros = zeros + 1 & (1 << bits) - 1

    def values() -> NDArray[np.uint8]:
        return unpacked(words, bits).reshape(len(words.rows), outputs, -1).swapaxes(0, 1).reshape(outputs, inputs)

    order = None
    if ".g_idx" in known:
        groups = known[".g_idx"].rows.view(np.int32).reshape(-1).astype(np.int64)
        order = None if np.array_equal(groups, np.arange(inputs) * len(scales) // inputs) else groups
    return Integers(words, values, zeros.T, np.ascontiguousarray(scales.T), bits, inputs, order).stored()


def of_awq(known: Mapping[str, Stored], settings: Mapping[str, Any], bits: int) -> Stored:
    """Words hold outputs, which take turns."""
    words, scales = known[".qweight"], floats(known[".scales"])

    def in_order(words: Stored) -> NDArray[np.uint8]:
        found = unpacked(words, 4)
        return found.reshape(len(found), -1, 8)[..., TURNS].reshape(len(found), -1).T

    zeros = in_order(known[".qzeros"]).astype(np.int16)
    return Integers(words, lambda: in_order(words), zeros, np.ascontiguousarray(scales.T), 4, words.shape[0]).stored()


def of_compressed(known: Mapping[str, Stored], settings: Mapping[str, Any], bits: int) -> Stored:
    """Words hold inputs, and those of zeros hold outputs."""
    words, scales = known[".weight_packed"], floats(known[".weight_scale"])
    outputs, inputs = map(int, known[".weight_shape"].rows.reshape(-1).view(np.int64))
    zeros: NDArray[np.int16] = np.full(scales.shape, 1 << (bits - 1), np.int16)
    if ".weight_zero_point" in known:
        packed, groups = known[".weight_zero_point"], scales.shape[1]
        found = unpacked(packed, bits).reshape(len(packed.rows), groups, -1).swapaxes(1, 2)
        zeros = found.reshape(-1, groups)[:outputs].astype(np.int16)
    order = None
    if ".weight_g_idx" in known:
        order = known[".weight_g_idx"].rows.view(np.int32).reshape(-1).astype(np.int64)
    return Integers(words, lambda: unpacked(words, bits)[:, :inputs], zeros, scales, bits, inputs, order).stored()


def of_float8(known: Mapping[str, Stored], settings: Mapping[str, Any], bits: int) -> Stored:
    """Values of float8_e4m3fn in squares that have a scale."""
    values, scales = known[".weight"], floats(known[".weight_scale_inv"])
    height, width = settings["weight_block_size"]
    shape = (values.shape[0], values.shape[1])

    def rows() -> NDArray[np.uint8]:
        found = FLOAT8_VALUES[values.rows]
        found *= scales.repeat(height, 0)[: shape[0]].repeat(width, 1)[:, : shape[1]]
        return rounded(found)

    return Computed(rows, GGMLQuantizationType.BF16, shape, values.mapping)


def float8_values() -> NDArray[np.float32]:
    """The values of all bytes as float8_e4m3fn: a sign, 4 bits of exponent with a bias of 7, 3 bits of mantissa."""
    bytes_ = np.arange(256)
    exponents, mantissas = bytes_ >> 3 & 15, bytes_ & 7
    values = np.where(exponents > 0, np.ldexp(8 + mantissas, exponents - 10), np.ldexp(mantissas, -9)).astype(np.float32)
    values[bytes_ & 127 == 127] = np.nan
    found: NDArray[np.float32] = np.where(bytes_ < 128, values, -values)
    return found


FLOAT8_VALUES = float8_values()
