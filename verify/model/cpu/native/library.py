"""The compiled library: the fastest variant that runs here, and threads that run it.

Each variant is the same source, compiled for other instructions (setup.py). They compute the same values, but pack weights in
layouts of their own.
"""

from __future__ import annotations

import ctypes
import os
import threading
from ctypes import c_int64, c_void_p
from functools import cache
from pathlib import Path

from outrider.verify.model.cpu.native import structures
from outrider.verify.model.cpu.native.variants import runnable


@cache
def compiled_library() -> ctypes.CDLL | None:
    """The fastest variant for this CPU; None if none was compiled. Raises ImportError for one of another version."""
    found = next(map(load, runnable()), None)
    if found is not None and not structures.fit(found):
        raise ImportError(f"{found._name} was compiled from other sources; install Outrider again with pip install.")
    return found


def variant() -> str:
    """The name of `compiled_library`'s variant; empty if none was compiled."""
    found = compiled_library()
    return "" if found is None else Path(found._name).name.partition(".")[0].removeprefix("_")


def load(file: Path) -> ctypes.CDLL:
    found = ctypes.CDLL(str(file))
    found.outrider_engine_new.restype = c_void_p
    found.outrider_matrix_bytes.restype = c_int64
    return found


class Engine:
    """Threads that run the library, one call at a time."""

    def __init__(self, threads: int, code: ctypes.CDLL | None = None) -> None:
        found = code or compiled_library()
        assert found is not None
        self.library, self.threads = found, threads
        self._lock = threading.Lock()
        self._handle = c_void_p(found.outrider_engine_new(threads))

    @staticmethod
    @cache
    def shared() -> Engine:
        """An engine with a thread for each core, for packing and for products outside of a forward."""
        return Engine(os.cpu_count() or 1)

    def call(self, name: str, *arguments: object) -> int:
        """Calls a function that takes the engine first."""
        with self._lock:
            return int(getattr(self.library, name)(self._handle, *arguments) or 0)

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            self.library.outrider_engine_delete(self._handle)
