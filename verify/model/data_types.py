"""Data types of what caches hold, by whoever computes it. Imports no torch."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class DataType(Protocol):
    """A data type, as far as the host's code knows it: torch's, numpy's and `HostType` are."""

    @property
    def itemsize(self) -> int: ...


class HostType(NamedTuple):
    """A data type of bytes in host memory."""

    name: str
    itemsize: int

    def __str__(self) -> str:
        return self.name


FLOAT32, FLOAT16, BFLOAT16 = HostType("float32", 4), HostType("float16", 2), HostType("bfloat16", 2)
INT8, FLOAT8 = HostType("int8", 1), HostType("float8_e4m3fn", 1)
