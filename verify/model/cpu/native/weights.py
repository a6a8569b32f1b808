"""Packed weights of linear layers: float32, bfloat16, and blocks of 8 or 4 bits."""

from __future__ import annotations

import ctypes
from enum import IntEnum

import numpy as np
import torch
from numpy.typing import NDArray

from verify.model.cpu.native.library import Engine, Linear, Matrix

BLOCK = 32  # inputs that share a scale
ALIGNMENT = 64  # bytes
CHUNK = 4096  # outputs that are converted to float32 at once


class Kind(IntEnum):
    """How weights are stored, as `Kind` in matrix.h."""

    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2
    INT4 = 3

    @property
    def is_quantized(self) -> bool:
        """Whether rows are quantised, too."""
        return self >= Kind.INT8

    def fits(self, inputs: int) -> bool:
        """Whether a layer with this many inputs can be packed."""
        return inputs % (BLOCK if self.is_quantized else 2) == 0


class Weights:
    """The weights of a linear layer or an embedding table, [outputs, inputs], packed for an engine's library."""

    def __init__(self, engine: Engine, kind: Kind, outputs: int, inputs: int) -> None:
        """Weights of unspecified value, to be written by `pack` or `pack_blocks`."""
        assert kind.fits(inputs)
        self.engine, self.kind, self.outputs, self.inputs = engine, kind, outputs, inputs
        shape = Matrix(kind, outputs, inputs, None)
        size = int(engine.library.outrider_matrix_bytes(ctypes.byref(shape)))
        memory = torch.zeros(size + ALIGNMENT, dtype=torch.uint8)
        self.data = memory[-memory.data_ptr() % ALIGNMENT :][:size]
        self.nbytes = size
        self.matrix = Matrix(kind, outputs, inputs, self.data.data_ptr())

    @classmethod
    def of(cls, engine: Engine, kind: Kind, weights: torch.Tensor) -> Weights:
        """The weights of a tensor, [outputs, inputs], rounded to `kind`."""
        found = cls(engine, kind, *weights.shape)
        for first in range(0, found.outputs, CHUNK):
            found.pack(first, weights[first : first + CHUNK].to(torch.float32).contiguous())
        return found

    def pack(self, first: int, rows: torch.Tensor) -> None:
        """Writes the outputs from `first` on: float32 [count, inputs]."""
        arguments = (ctypes.byref(self.matrix), first, len(rows), ctypes.c_void_p(rows.data_ptr()))
        self.engine.call("outrider_matrix_pack", *arguments)

    def pack_blocks(self, first: int, stored: int, blocks: NDArray[np.uint8]) -> None:
        """Writes the outputs from `first` on from blocks of a GGUF file, [count, bytes], of ggml's type `stored`."""
        blocks = np.ascontiguousarray(blocks)
        arguments = (ctypes.byref(self.matrix), first, len(blocks), stored, ctypes.c_void_p(blocks.ctypes.data))
        self.engine.call("outrider_matrix_pack_stored", *arguments)

    def unpack(self, outputs: torch.Tensor) -> torch.Tensor:
        """The weights of some outputs, int64 [...], as float32 [..., inputs]."""
        wanted = outputs.contiguous()
        found = torch.empty(*outputs.shape, self.inputs)
        places = (ctypes.c_void_p(wanted.data_ptr()), int(wanted.numel()), ctypes.c_void_p(found.data_ptr()))
        self.engine.library.outrider_matrix_unpack(ctypes.byref(self.matrix), *places)
        return found


def product(
    engine: Engine,
    kind: Kind,
    outputs: int,
    inputs: int,
    packed: torch.Tensor,
    rows: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """[..., inputs] to [..., outputs] of the same data type, by `Weights.data`; `bias`, float32 [outputs], is added."""
    values = rows.to(torch.float32).contiguous()
    out = torch.empty(*rows.shape[:-1], outputs)
    layer = Linear(Matrix(kind, outputs, inputs, packed.data_ptr()), None if bias is None else bias.data_ptr())
    places = (ctypes.c_void_p(values.data_ptr()), values.numel() // inputs, ctypes.c_void_p(out.data_ptr()))
    engine.call("outrider_multiply", ctypes.byref(layer), *places)
    return out.to(rows.dtype)
