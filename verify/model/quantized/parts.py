"""The tensors of a quantised layer. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from outrider.verify.model.stored import Part, Stored

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
