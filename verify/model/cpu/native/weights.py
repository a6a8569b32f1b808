"""Packed weights of linear layers: float32, bfloat16, and the quantised types of GGUF files. Imports no torch."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from enum import IntEnum
from functools import cache, partial
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, quants
from numpy.typing import NDArray

from outrider.verify.model.cpu.native.library import Engine
from outrider.verify.model.cpu.native.packed_file import ALIGNMENT, PackedFile, aligned
from outrider.verify.model.cpu.native.structures import Linear, Matrix, Table
from outrider.verify.model.stored import Stored, StoredType, Zeroed

# The inputs of a quantised block.
BLOCK = 32
# The inputs of a block of IQ4_XS, and of the types that ggml calls K.
SUPERBLOCK = 256
# The outputs that are packed together (vector.h), and about as many values as are packed at once.
PANEL, AT_ONCE = 32, 1 << 22
# The number of a table's rows that are converted at once.
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
    MXFP4 = 12
    Q2_K = 13
    Q3_K = 14
    IQ1_S = 15
    IQ1_M = 16
    IQ2_XXS = 17
    IQ2_XS = 18
    IQ2_S = 19
    IQ3_XXS = 20
    IQ3_S = 21
    TQ1_0 = 22
    TQ2_0 = 23
    NVFP4 = 24
    ZERO4 = 25  # of GPTQ and AWQ: a float16 scale and an integer zero per block
    ZERO8 = 26

    @property
    def is_quantized(self) -> bool:
        """Whether rows are quantised, too."""
        return self >= Kind.INT8

    @property
    def inputs(self) -> int:
        """The number that a layer's inputs must be a multiple of."""
        if not self.is_quantized:
            return 2
        if self == Kind.NVFP4:
            return 2 * BLOCK
        of_superblocks = self in (Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.IQ4_XS) or Kind.Q2_K <= self <= Kind.TQ2_0
        return SUPERBLOCK if of_superblocks else BLOCK

    def fits(self, inputs: int) -> bool:
        """Whether a layer with this many inputs can be packed."""
        return inputs % self.inputs == 0


# Quantised types, which are packed as they are.
KINDS: dict[StoredType, Kind] = {GGMLQuantizationType.Q8_0: Kind.INT8, GGMLQuantizationType.Q4_1: Kind.INT4}
KINDS |= {GGMLQuantizationType[kind.name]: kind for kind in Kind if Kind.INT4 < kind < Kind.ZERO4}
KINDS |= {Zeroed.ZERO4: Kind.ZERO4, Zeroed.ZERO8: Kind.ZERO8}
# Kinds whose values are rows of a grid.
GRIDS = range(Kind.IQ1_S, Kind.TQ1_0)
FLOATS = (GGMLQuantizationType.F32, GGMLQuantizationType.F16)
# Types of tables that stay as they are, by the library's numbers (description.h).
TABLES: dict[StoredType, int] = {
    **{type: kind for type, kind in KINDS.items() if kind not in GRIDS},
    GGMLQuantizationType.F32: Kind.FLOAT32,
    GGMLQuantizationType.BF16: Kind.BFLOAT16,
    GGMLQuantizationType.F16: -1,
}


class Weights:
    """The weights of a linear layer or an embedding table, [outputs, inputs], packed for an engine's library."""

    def __init__(self, engine: Engine, kind: Kind, outputs: int, inputs: int, data: NDArray[np.uint8]) -> None:
        assert kind.fits(inputs)
        self.engine, self.kind, self.outputs, self.inputs = engine, kind, outputs, inputs
        self.data, self.nbytes = data, len(data)
        self.matrix = Matrix(kind, outputs, inputs, data.ctypes.data)

    @classmethod
    def of(cls, engine: Engine, kind: Kind, weights: NDArray[np.float32], file: PackedFile | None = None) -> Weights:
        """The weights of an array, [outputs, inputs], rounded to `kind`: a float, INT8 or INT4."""
        assert kind.fits(weights.shape[1])
        rows = np.ascontiguousarray(weights, np.float32).view(np.uint8)
        return cls.stored(engine, Stored(rows, GGMLQuantizationType.F32, weights.shape), kind, file)

    @classmethod
    def stored(cls, engine: Engine, tensor: Stored, kind: Kind | None = None, file: PackedFile | None = None) -> Weights:
        """A file's weights, [outputs, inputs]: as they are if they can be packed so, or rounded to `kind`."""
        outputs, inputs = tensor.shape
        if kind is None or not kind.fits(inputs):
            kind = KINDS.get(tensor.type, Kind.FLOAT32 if tensor.type in FLOATS else Kind.BFLOAT16)
            kind = kind if kind.fits(inputs) else Kind.FLOAT32
        size, parts = packed_bytes(engine, kind, outputs, inputs), partial(packed_parts, engine, kind, tensor)
        data = (file or PackedFile()).take(size, parts)
        found = cls(engine, kind, outputs, inputs, data)
        found.scale(tensor.scales)
        return found

    def scale(self, scales: NDArray[np.float32] | None) -> None:
        """Multiplies outputs by `scales`, float32 [outputs]; None = by 1."""
        self.scales = None if scales is None else np.ascontiguousarray(scales)
        self.matrix.scales = None if self.scales is None else self.scales.ctypes.data

    def unpack(self, outputs: NDArray[np.int64]) -> NDArray[np.float32]:
        """The weights of some outputs, [...], as float32 [..., inputs]."""
        wanted = np.ascontiguousarray(outputs)
        found = np.empty((*outputs.shape, self.inputs), np.float32)
        places = (ctypes.c_void_p(wanted.ctypes.data), wanted.size, ctypes.c_void_p(found.ctypes.data))
        self.engine.library.outrider_matrix_unpack(ctypes.byref(self.matrix), *places)
        return found


def packed_bytes(engine: Engine, kind: Kind, outputs: int, inputs: int) -> int:
    return int(engine.library.outrider_matrix_bytes(ctypes.byref(Matrix(kind, outputs, inputs, None))))


def packed_parts(
    engine: Engine, kind: Kind, tensor: Stored, place: NDArray[np.uint8] | None = None
) -> Iterator[NDArray[np.uint8]]:
    """Packs a tensor part by part, and yields the bytes of each, so that little of it is in memory at once.

    They are in `place`, uint8 [bytes of the whole], or else valid until the next part.
    """
    outputs, inputs = tensor.shape
    count = min(max(1, AT_ONCE // (inputs * PANEL)) * PANEL, outputs)
    memory = place
    if memory is None:
        memory = aligned(np.zeros(packed_bytes(engine, kind, count, inputs) + ALIGNMENT, np.uint8), ALIGNMENT)
    read = tensor.take(slice(None))  # once, if its rows are computed
    for first in range(0, outputs, count):
        part = Matrix(kind, min(count, outputs - first), inputs, memory.ctypes.data)
        if first and part.outputs % PANEL:  # outputs after the last one are zero
            memory.fill(0)
        if KINDS.get(tensor.type) == kind:
            pack_blocks(engine, part, read.rows[first : first + count])
        else:
            rows = np.ascontiguousarray(read.unscaled(first, first + count))
            arguments = (ctypes.byref(part), 0, len(rows), ctypes.c_void_p(rows.ctypes.data))
            engine.call("outrider_matrix_pack", *arguments)
        tensor.release()
        size = packed_bytes(engine, kind, part.outputs, inputs)
        yield memory[:size]
        if place is not None:
            memory = memory[size:]


def pack_blocks(engine: Engine, matrix: Matrix, blocks: NDArray[np.uint8]) -> None:
    """Packs blocks of a GGUF file, [outputs, bytes], of the type that the matrix's kind names."""
    blocks, grid = np.ascontiguousarray(blocks), grid_of(Kind(matrix.kind))
    places = (ctypes.c_void_p(blocks.ctypes.data), None if grid is None else ctypes.c_void_p(grid.ctypes.data))
    engine.call("outrider_matrix_pack_stored", ctypes.byref(matrix), 0, len(blocks), *places)


@cache
def grid_of(kind: Kind) -> NDArray[np.uint8] | None:
    """The grid of a kind as numbers of values, counted from the lowest one, [rows, 8 or 4]; None if it has none."""
    if kind not in GRIDS:
        return None
    known: Any = getattr(quants, kind.name)
    known.init_grid()
    found: NDArray[np.uint8] = np.searchsorted(np.array(known.grid_map), known.grid[0, 0]).astype(np.uint8)
    return found


def table_of(stored: Stored, width: int) -> tuple[Table, Stored]:
    """A table of rows of this width, and the tensor that it refers to: a file's, or its values rounded to bfloat16."""
    kind = TABLES.get(stored.type)
    if kind is None or stored.scales is not None or width % quants.GGML_QUANT_SIZES[stored.type][0]:
        chunks = (stored.floats(first, first + CHUNK) for first in range(0, len(stored.rows), CHUNK))
        rows = np.concatenate([quants.quantize(each, GGMLQuantizationType.BF16) for each in chunks])
        kind, stored = Kind.BFLOAT16, Stored(rows, GGMLQuantizationType.BF16, stored.shape)
    return Table(stored.rows.ctypes.data, kind, stored.shape[0] * stored.shape[1] // width, width), stored


def multiply(engine: Engine, matrix: Matrix, rows: NDArray[np.float32], bias: Any = None) -> NDArray[np.float32]:
    """[count, inputs] to [count, outputs]; `bias`, the address of float32 [outputs], is added. Rows are contiguous."""
    out = np.empty((len(rows), matrix.outputs), np.float32)
    layer = Linear(matrix, bias)
    places = (ctypes.c_void_p(rows.ctypes.data), len(rows), ctypes.c_void_p(out.ctypes.data))
    engine.call("outrider_multiply", ctypes.byref(layer), *places)
    return out
