"""Passes over logits by the library: one pass where torch makes ten."""

from __future__ import annotations

import ctypes

import torch

from outrider.verify.model.cpu.native.library import compiled_library

# There are hardly ever more contenders.
FEW = 64


def can_read(logits: torch.Tensor) -> bool:
    """Whether the library was compiled and reads these logits, [V] or [M, V]."""
    is_plain = logits.device.type == "cpu" and logits.dtype == torch.float32 and logits.is_contiguous()
    return is_plain and compiled_library() is not None


def likeliest(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` likeliest tokens of each row of logits [M, V]: int32 ids and float32 probabilities, [M, count].

    Of equal logits, the smaller id is first. Requires `can_read`, and a vocabulary of at least `count`.
    """
    code = compiled_library()
    assert code is not None
    rows, vocabulary = logits.shape
    ids, probabilities = torch.empty(rows, count, dtype=torch.int32), torch.empty(rows, count)
    code.outrider_likeliest(_at(logits), rows, vocabulary, count, _at(ids), _at(probabilities))
    return ids, probabilities


def contenders(logits: torch.Tensor, temperature: float, key: int, rounding: float) -> torch.Tensor:
    """The tokens of one row [V] that keyed sampling may choose, int64 [C], ascending; none if the largest is not finite.

    With a temperature of 0, the likeliest token. `key` is the uint64 of the seed and position; scores that are computed
    elsewhere may differ by `rounding`. Requires `can_read`.
    """
    code = compiled_library()
    assert code is not None
    numbers = ctypes.c_float(temperature), ctypes.c_uint64(key), ctypes.c_float(rounding)
    ids = torch.empty(FEW, dtype=torch.int32)
    found = code.outrider_contenders(_at(logits), len(logits), *numbers, len(ids), _at(ids))
    if found > len(ids):
        ids = torch.empty(found, dtype=torch.int32)
        code.outrider_contenders(_at(logits), len(logits), *numbers, len(ids), _at(ids))
    return ids[: max(0, found)].long()


def _at(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())
