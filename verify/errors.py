"""Errors with a one-sentence message for the user."""

from __future__ import annotations

import sys


class ModelError(ValueError):
    """The model cannot be served; the message says why."""


def lost_device() -> tuple[type[Exception], ...]:
    """The errors after which only a new process can use the device again, for an `except` clause. Imports no torch."""
    return (sys.modules["torch"].AcceleratorError,) if sys.modules.get("torch") else ()


def out_of_memory() -> tuple[type[Exception], ...]:
    """The errors of a lack of memory, on the host and on a device, for an `except` clause. Imports no torch."""
    return (MemoryError, *((sys.modules["torch"].OutOfMemoryError,) if sys.modules.get("torch") else ()))


def first_sentence(error: Exception) -> str:
    """The first line of an error's message that is not blank, with at most 300 characters."""
    return " ".join(str(error).strip().split("\n")[0].split())[:300]
