"""Packed weights of linear layers: float32, bfloat16, and the quantised types of GGUF files."""

from __future__ import annotations

import ctypes
from enum import IntEnum

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.verify.model.cpu.native.huge_pages import HugePages
from outrider.verify.model.cpu.native.library import Engine, Linear, Matrix

# The inputs of a quantised block.
BLOCK = 32
# The inputs of a block of IQ4_XS, and of the types that ggml calls K.
SUPERBLOCK = 256
# The number of outputs that are converted to float32 at once.
CHUNK = 4096


class Kind(IntEnum):
    """How weights are stored, as `Kind` in matrix.h. Quantised kinds are types of GGUF files."""

    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2  # Q8_0; a float16 scale per block
    INT4 = 3  # Q4_1; a float16 scale and minimum per block
    Q4_0 = 4
    Q5_0 = 5
    Q5_1 = 6
    Q4_K = 7
    Q5_K = 8
    Q6_K = 9
    IQ4_NL = 10
    IQ4_XS = 11

    @property
    def is_quantized(self) -> bool:
        """Whether rows are quantised, too."""
        return self >= Kind.INT8

    @property
    def inputs(self) -> int:
        """The number that a layer's inputs must be a multiple of."""
        if not self.is_quantized:
            return 2
        return SUPERBLOCK if self in (Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.IQ4_XS) else BLOCK

    def fits(self, inputs: int) -> bool:
        """Whether a layer with this many inputs can be packed."""
        return inputs % self.inputs == 0


class Weights:
    """The weights of a linear layer or an embedding table, [outputs, inputs], packed for an engine's library."""

    def __init__(self, engine: Engine, kind: Kind, outputs: int, inputs: int) -> None:
        """Weights of unspecified value, to be written by `pack` or `pack_blocks`."""
        assert kind.fits(inputs)
        self.engine, self.kind, self.outputs, self.inputs = engine, kind, outputs, inputs
        shape = Matrix(kind, outputs, inputs, None)
        size = int(engine.library.outrider_matrix_bytes(ctypes.byref(shape)))
        self.data = HugePages.shared().take(size)
        self.nbytes = size
        self.matrix = Matrix(kind, outputs, inputs, self.data.data_ptr())

    @classmethod
    def of(cls, engine: Engine, kind: Kind, weights: torch.Tensor) -> Weights:
        """The weights of a tensor, [outputs, inputs], rounded to `kind`: a float, INT8 or INT4."""
        found = cls(engine, kind, *weights.shape)
        for first in range(0, found.outputs, CHUNK):
            found.pack(first, weights[first : first + CHUNK].to(torch.float32).contiguous())
        return found

    def pack(self, first: int, rows: torch.Tensor) -> None:
        """Writes the outputs from `first` on: float32 [count, inputs]."""
        arguments = (ctypes.byref(self.matrix), first, len(rows), ctypes.c_void_p(rows.data_ptr()))
        self.engine.call("outrider_matrix_pack", *arguments)

    def pack_blocks(self, blocks: NDArray[np.uint8]) -> None:
        """Writes all outputs from blocks of a GGUF file, [outputs, bytes], of the type that the kind names."""
        blocks = np.ascontiguousarray(blocks)
        arguments = (ctypes.byref(self.matrix), 0, len(blocks), ctypes.c_void_p(blocks.ctypes.data))
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
