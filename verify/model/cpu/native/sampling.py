"""Passes over logits by the library: one pass where numpy makes ten. Imports no torch."""

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.verify.model.cpu.native.library import compiled_library

# There are hardly ever more contenders.
FEW = 64


def can_read(logits: NDArray[np.float32]) -> bool:
    """Whether the library was compiled and reads these logits, [V] or [M, V]."""
    return logits.dtype == np.float32 and logits.flags.c_contiguous and compiled_library() is not None


def likeliest(logits: NDArray[np.float32], count: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """The `count` likeliest tokens of each row of logits [M, V]: ids and probabilities, [M, count].

    Of equal logits, the smaller id is first. Requires `can_read`, and a vocabulary of at least `count`.
    """
    code = compiled_library()
    assert code is not None
    rows, vocabulary = logits.shape
    ids, probabilities = np.empty((rows, count), np.int32), np.empty((rows, count), np.float32)
    code.outrider_likeliest(_at(logits), rows, vocabulary, count, _at(ids), _at(probabilities))
    return ids, probabilities


def contenders(logits: NDArray[np.float32], temperature: float, key: int, rounding: float) -> NDArray[np.int64]:
    """The tokens of one row [V] that keyed sampling may choose, [C], ascending; none if the largest is not finite.

    With a temperature of 0, the likeliest token. `key` is the uint64 of the seed and position; scores that are computed
    elsewhere may differ by `rounding`. Requires `can_read`.
    """
    code = compiled_library()
    assert code is not None
    numbers = ctypes.c_float(temperature), ctypes.c_uint64(key), ctypes.c_float(rounding)
    ids = np.empty(FEW, np.int32)
    found = code.outrider_contenders(_at(logits), len(logits), *numbers, len(ids), _at(ids))
    if found > len(ids):
        ids = np.empty(found, np.int32)
        code.outrider_contenders(_at(logits), len(logits), *numbers, len(ids), _at(ids))
    return ids[: max(0, found)].astype(np.int64)


def _at(array: NDArray[Any]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)
