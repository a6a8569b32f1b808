"""Machine code as in `outrider.verify.model.cpu.panel_kernel`, for CPUs whose tile registers multiply matrices of bfloat16
(AMX).

A tile holds up to 16 rows of 64 bytes. The instruction adds the products of 16 rows with 16 outputs, 32 inputs at a time, to
sums in float32. Panels for two products at a time have the order in which it reads weights. So one layout serves steps, whose
time is that of reading it, and prompts, which need the arithmetic. What it computes is `panel_kernel.expected`, 32 inputs at a
time, and the bias last.
"""

from __future__ import annotations

from collections.abc import Iterator

from outrider.verify.model.cpu.panel_kernel import VECTORS, Kernel

TILE_ROWS, TILE_BYTES = 16, 64
# The bfloat16 values of a tile's row.
TILE_INPUTS = 32
# The number of tile registers.
TILES = 8
# The use of the registers: sums for each pair of a tile of rows and a tile of weights, rows, and weights.
SUMS, ROWS, WEIGHTS = (0, 1, 2, 3), (4, 5), (6, 7)
# This palette has registers of TILE_ROWS rows of TILE_BYTES bytes.
PALETTE = 1

DECLARATIONS = """
declare void @llvm.x86.ldtilecfg(ptr)
declare void @llvm.x86.tilerelease()
declare void @llvm.x86.tilezero(i8 immarg)
declare void @llvm.x86.tileloadd64(i8 immarg, ptr, i64)
declare void @llvm.x86.tilestored64(i8 immarg, ptr, i64)
declare void @llvm.x86.tdpbf16ps(i8 immarg, i8 immarg, i8 immarg)
"""


class TileKernel(Kernel):
    """Machine code that multiplies a panel with up to two tiles of rows at a time."""

    step = TILE_INPUTS

    def _declarations(self) -> Iterator[str]:
        yield DECLARATIONS
        for rows in range(1, self.rows + 1):
            values = ", ".join(f"i8 {value}" for value in configuration(rows))
            yield f"@tiles{rows} = internal constant [64 x i8] [{values}], align 64"

    def _multiply(self, rows: int) -> Iterator[str]:
        """The function that multiplies a block of `rows`, in one or two tiles, with a panel, in two tiles. In Python:

        for input in range(0, inputs, 32):
            for index, part in product(tiles of rows, (0, 1)):
                sums[index][part] += rows[index][:, input : input + 32] @ weights[part][input : input + 32]
        for row in range(rows):
            out[row] = sums[row] + bias
        """
        counts = tile_rows(rows)
        row_bytes = 4 * self.width
        yield (
            f"define internal void @multiply{rows}"
            "(ptr %weights, ptr %rows, ptr %bias, ptr %out, i64 %inputs, i64 %outputs) {\nentry:"
        )
        # entry: memory for the sums, the bytes of a row, the registers' sizes, each tile's first row, and sums of zero.
        yield f"%sums = alloca [{rows * row_bytes} x i8], align {TILE_BYTES}\n%stride = shl i64 %inputs, 1"
        yield f"call void @llvm.x86.ldtilecfg(ptr @tiles{rows})"
        for index in range(len(counts)):
            yield f"%first{index} = mul i64 %inputs, {TILE_ROWS * index}"
            yield f"%rows{index} = getelementptr i16, ptr %rows, i64 %first{index}"
        for register in SUMS[: VECTORS * len(counts)]:
            yield f"call void @llvm.x86.tilezero(i8 {register})"
        # step: for input in range(0, inputs, 32).
        yield "br label %step\nstep:\n%input = phi i64 [0, %entry], [%next, %step]"
        yield from self._load_tiles(len(counts))
        for index in range(len(counts)):
            for part in range(VECTORS):
                operands = f"i8 {SUMS[VECTORS * index + part]}, i8 {ROWS[index]}, i8 {WEIGHTS[part]}"
                yield f"call void @llvm.x86.tdpbf16ps({operands})"
        yield f"%next = add i64 %input, {TILE_INPUTS}\n%is_more = icmp ult i64 %next, %inputs"
        yield "br i1 %is_more, label %step, label %release\nrelease:"
        # release: the sums' memory is [rows, width]: a tile's first row is TILE_ROWS rows below, its outputs one vector beside.
        for index in range(len(counts)):
            for part in range(VECTORS):
                place = TILE_ROWS * index * row_bytes + TILE_BYTES * part
                yield f"%tile{index}.{part} = getelementptr i8, ptr %sums, i64 {place}"
                tile = f"i8 {SUMS[VECTORS * index + part]}, ptr %tile{index}.{part}, i64 {row_bytes}"
                yield f"call void @llvm.x86.tilestored64({tile})"
        yield "call void @llvm.x86.tilerelease()"
        yield from self._store_rows(rows)

    def _load_tiles(self, count: int) -> Iterator[str]:
        """Loads tiles of rows and of weights, and prefetches as many weights.

        A row of a tile of weights has two inputs of 16 outputs; the next two inputs are a panel's width further.
        """
        for index in range(count):
            yield f"%from{index} = getelementptr i16, ptr %rows{index}, i64 %input"
            yield f"call void @llvm.x86.tileloadd64(i8 {ROWS[index]}, ptr %from{index}, i64 %stride)"
        yield f"%place = mul i64 %input, {self.width}\n%panel = getelementptr i16, ptr %weights, i64 %place"
        yield from self._prefetch()
        for part in range(VECTORS):
            yield f"%part{part} = getelementptr i8, ptr %panel, i64 {TILE_BYTES * part}"
            yield f"call void @llvm.x86.tileloadd64(i8 {WEIGHTS[part]}, ptr %part{part}, i64 {TILE_BYTES * VECTORS})"

    def _store_rows(self, rows: int) -> Iterator[str]:
        """Adds the bias to the sums of each row, and writes the outputs."""
        vector = self.vector("float")
        yield "%has_bias = icmp ne ptr %bias, null\nbr i1 %has_bias, label %biased, label %store\nbiased:"
        for part in range(VECTORS):
            yield from self._load_values(f"bias{part}", "%bias", part * self.lanes)
        yield "br label %store\nstore:"
        # store: for row in range(rows). %added is the bias or 0 in each of them.
        yield "%row = phi i64 [0, %release], [0, %biased], [%next_row, %store]"
        for part in range(VECTORS):
            start = f"[zeroinitializer, %release], [%bias{part}, %biased], [%added{part}, %store]"
            yield f"%added{part} = phi {vector} {start}"
        yield f"%start = mul i64 %row, {VECTORS * self.lanes}\n%out_start = mul i64 %row, %outputs"
        for part in range(VECTORS):
            yield f"%sum{part}.place = add i64 %start, {part * self.lanes}"
            yield f"%sum{part}.at = getelementptr float, ptr %sums, i64 %sum{part}.place"
            yield f"%sum{part} = load {vector}, ptr %sum{part}.at, align {TILE_BYTES}"
            yield f"%total{part} = fadd {vector} %sum{part}, %added{part}"
            yield f"%place{part} = add i64 %out_start, {part * self.lanes}"
            yield from self._store(f"%total{part}", f"%place{part}", str(part))
        yield f"%next_row = add i64 %row, 1\n%is_left = icmp ult i64 %next_row, {rows}"
        yield "br i1 %is_left, label %store, label %end\nend:\nret void\n}"


def tile_rows(rows: int) -> list[int]:
    """The rows of each tile of a block."""
    return [min(TILE_ROWS, rows - first) for first in range(0, rows, TILE_ROWS)]


def configuration(rows: int) -> bytes:
    """The registers' sizes for a block of rows, in the form of the CPU's instruction."""
    heights = [0] * TILES
    for index, count in enumerate(tile_rows(rows)):
        for register in (*SUMS[VECTORS * index : VECTORS * (index + 1)], ROWS[index]):
            heights[register] = count
    for register in WEIGHTS:
        heights[register] = TILE_ROWS
    widths = b"".join((TILE_BYTES if height else 0).to_bytes(2, "little") for height in heights)
    return bytes([PALETTE]).ljust(16, b"\0") + widths.ljust(32, b"\0") + bytes(heights).ljust(16, b"\0")
