"""Layers whose integers are packed in words of 32 bits: GPTQ, AWQ, and compressed-tensors' `pack-quantized`. Imports no torch.

The bits of a layer's integers follow from its tensors' shapes, so layers of one checkpoint may differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from outrider.verify.model.quantized.integers import Integers, unpacked
from outrider.verify.model.quantized.parts import Parts, Settings, UnknownFormatError, floats
from outrider.verify.model.stored import Stored

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
