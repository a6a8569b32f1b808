"""Data types of what caches in host memory hold. Imports no torch."""

from __future__ import annotations

from typing import NamedTuple


class HostType(NamedTuple):
    """A data type of bytes in host memory."""

    name: str
    itemsize: int

    def __str__(self) -> str:
        return self.name


FLOAT32, FLOAT16, BFLOAT16 = HostType("float32", 4), HostType("float16", 2), HostType("bfloat16", 2)
INT8, FLOAT8 = HostType("int8", 1), HostType("float8_e4m3fn", 1)
