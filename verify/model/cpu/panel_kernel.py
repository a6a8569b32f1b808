"""Machine code that multiplies rows by a matrix of weights, generated for this CPU.

A step multiplies a few rows by large matrices, so its time is that of reading the weights, if the arithmetic keeps up. The
weights lie in panels of `Kernel.width` outputs, in the order in which they are read. Each thread reads some of the panels,
and multiplies a panel with up to `Kernel.rows` rows at a time, whose sums stay in registers; further rows read it from the
cache. Every sum adds its products in the order of the inputs, so a row has the same bits beside any number of other rows.

The code is compiled by `outrider.verify.model.cpu.llvm` and registered by `outrider.verify.model.cpu.libtorch`, so a trace
calls it without Python, on PyTorch's own threads. `expected` is what it computes, as a loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from outrider.verify.model.cpu.libtorch import TASK, register

# Bytes are prefetched this far ahead of those that are multiplied. With less, memory is idle between pages.
PREFETCHED = 4096
# The size in bytes.
CACHE_LINE = 64
# The width of a panel in vectors.
VECTORS = 2


class Arithmetic(StrEnum):
    """How weights are multiplied; sums are float32. Each has an operator of its name, `multiply_...`."""

    FLOAT32 = "float32"  # weights and rows in float32
    WIDENED = "widened"  # weights in bfloat16, widened to float32; rows in float32
    PAIRS = "pairs"  # weights and rows in bfloat16, two products at a time by an instruction of the CPU
    TILES = "tiles"  # weights and rows in bfloat16, 16 rows and 32 inputs at a time (`outrider.verify.model.cpu.tile_kernel`)

    @property
    def weight_bytes(self) -> int:
        """Bytes of a weight, and of an output."""
        return 4 if self is Arithmetic.FLOAT32 else 2


# What each of PyTorch's threads runs. The rows are cut into the fewest blocks, of nearly equal size. In Python:
#
#     blocks = ceil(count / rows); most = ceil(count / blocks)
#     for index in range(begin, end):
#         for row in range(0, count, most):
#             multiply[min(count - row, most)](weights[index], rows[row:], bias and bias[index], out[row:, index])
PANELS = """
define void @multiply_panels(i64 %begin, i64 %end, ptr %task) {{
entry:  ; reads the task; blocks = ceil(count / {rows}), and most = ceil(count / blocks), where no rows have no blocks
  {fields}
  %rounded_count = add i64 %count, {rows_less_one}
  %blocks = udiv i64 %rounded_count, {rows}
  %filled = add i64 %rounded_count, %blocks
  %cut = sub i64 %filled, {rows}
  %is_empty = icmp eq i64 %count, 0
  %divisor = select i1 %is_empty, i64 1, i64 %blocks
  %most = udiv i64 %cut, %divisor
  br label %panel
panel:  ; the addresses of a panel's weights, bias and first output; without a bias, its address stays null
  %index = phi i64 [%begin, %entry], [%next_index, %end_panel]
  %values = mul i64 %inputs, {width}
  %first_value = mul i64 %index, %values
  %first_output = mul i64 %index, {width}
  %panel_weights = getelementptr {value}, ptr %weights, i64 %first_value
  %own_bias = getelementptr {value}, ptr %bias, i64 %first_output
  %has_bias = icmp ne ptr %bias, null
  %panel_bias = select i1 %has_bias, ptr %own_bias, ptr null
  %panel_out = getelementptr {value}, ptr %out, i64 %first_output
  br label %block
block:  ; size = min(count - row, most), and the addresses of the block's first row and output; calls the function of its size
  %row = phi i64 [0, %panel], [%next_row, %end_block]
  %rest = sub i64 %count, %row
  %is_short = icmp ult i64 %rest, %most
  %size = select i1 %is_short, i64 %rest, i64 %most
  %first_input = mul i64 %row, %inputs
  %block_rows = getelementptr {input}, ptr %rows, i64 %first_input
  %first_place = mul i64 %row, %outputs
  %block_out = getelementptr {value}, ptr %panel_out, i64 %first_place
  switch i64 %size, label %end_block [{cases}]
{calls}
end_block:  ; row += most
  %next_row = add i64 %row, %most
  %is_more = icmp ult i64 %next_row, %count
  br i1 %is_more, label %block, label %end_panel
end_panel:  ; index += 1
  %next_index = add i64 %index, 1
  %is_left = icmp ult i64 %next_index, %end
  br i1 %is_left, label %panel, label %finish
finish:
  ret void
}}
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)
"""


Floats = NDArray[np.float32]


def expected(weights: Floats, rows: Floats, bias: Floats | None) -> Floats:
    """What the code computes for weights [outputs, inputs] and rows [N, inputs]: sums [N, outputs], before they are rounded.

    A product and its sum are rounded once (a fused multiply-add), if float64 holds both exactly. Kernels of PAIRS and TILES add
    the products of several inputs in an order of the CPU's own.
    """
    sums = np.zeros((len(rows), len(weights)), np.float32) + (0 if bias is None else bias)
    for input in range(weights.shape[1]):
        products = weights[:, input].astype(np.float64) * rows[:, input, None]
        sums = (sums + products).astype(np.float32)
    return sums


@dataclass(frozen=True)
class Kernel:
    """Machine code for one arithmetic and one size of vectors."""

    arithmetic: Arithmetic
    lanes: int  # float32 values of a vector
    rows: int  # of a block; their sums, with a panel's weights, fill the registers
    step: ClassVar[int] = 2  # inputs that are multiplied at a time

    @property
    def width(self) -> int:
        """Outputs of a panel."""
        return VECTORS * self.lanes

    def source(self) -> str:
        """The code in LLVM's language."""
        sizes = range(1, self.rows + 1)
        fields = []
        for index, field in enumerate(TASK):
            kind, name = field.split()
            fields += [f"%{name}_at = getelementptr i64, ptr %task, i64 {index}", f"%{name} = load {kind}, ptr %{name}_at"]
        arguments = "ptr %panel_weights, ptr %block_rows, ptr %panel_bias, ptr %block_out, i64 %inputs, i64 %outputs"
        panels = PANELS.format(
            fields="\n  ".join(fields),
            width=self.width,
            rows=self.rows,
            rows_less_one=self.rows - 1,
            value=self._value,
            input=self._input,
            cases=" ".join(f"i64 {size}, label %rows{size}" for size in sizes),
            calls="\n".join(f"rows{n}:\n  call void @multiply{n}({arguments})\n  br label %end_block" for n in sizes),
        )
        functions = ("\n".join(self._multiply(size)) for size in sizes)
        return "\n".join([*self._declarations(), panels, *functions])

    def vector(self, kind: str) -> str:
        """LLVM's type of a vector."""
        return f"<{self.lanes} x {kind}>"

    @property
    def _value(self) -> str:
        """LLVM's type of a weight and of an output."""
        return "float" if self.arithmetic is Arithmetic.FLOAT32 else "i16"

    @property
    def _input(self) -> str:
        """LLVM's type of a row's value."""
        return "i16" if self.arithmetic in (Arithmetic.PAIRS, Arithmetic.TILES) else "float"

    def _all(self, value: int) -> str:
        """A vector of equal integers."""
        return f"<{', '.join([f'i32 {value}'] * self.lanes)}>"

    def _declarations(self) -> Iterator[str]:
        """What the functions of `_multiply` need."""
        vector = self.vector("float")
        yield f"declare {vector} @llvm.fma.v{self.lanes}f32({vector}, {vector}, {vector})"

    def _multiply(self, rows: int) -> Iterator[str]:
        """The function that multiplies a block of `rows` with a panel: `expected`, two inputs at a time.

        The sums of row i and of the panel's vector j are %sum{i}.{j}, and with the step's products %added{i}.{j}.
        """
        vector = self.vector("float")
        sums = [f"{row}.{part}" for row in range(rows) for part in range(VECTORS)]
        yield (
            f"define internal void @multiply{rows}"
            "(ptr %weights, ptr %rows, ptr %bias, ptr %out, i64 %inputs, i64 %outputs) {\nentry:"
        )
        # entry: the address of each row.
        for row in range(rows):
            yield f"%first{row} = mul i64 %inputs, {row}"
            yield f"%row{row} = getelementptr {self._input}, ptr %rows, i64 %first{row}"
        yield "%has_bias = icmp ne ptr %bias, null\nbr i1 %has_bias, label %biased, label %step\nbiased:"
        # biased: the bias of the panel's outputs.
        for part in range(VECTORS):
            yield from self._load_values(f"bias{part}", "%bias", part * self.lanes)
        yield "br label %step\nstep:"
        # step: for input in range(0, inputs, 2). Before the first, sums are the bias or 0, and then what was added last.
        yield "%input = phi i64 [0, %entry], [0, %biased], [%next, %step]"
        for each in sums:
            start = f"[zeroinitializer, %entry], [%bias{each.split('.')[1]}, %biased]"
            yield f"%sum{each} = phi {vector} {start}, [%added{each}, %step]"
        yield from self._load_weights()
        yield from self._add_products(rows)
        yield "%next = add i64 %input, 2\n%is_more = icmp ult i64 %next, %inputs"
        yield "br i1 %is_more, label %step, label %store\nstore:"
        # store: each sum at out[row * outputs + its place in the panel].
        for each in sums:
            row, part = map(int, each.split("."))
            yield f"%start{each} = mul i64 %outputs, {row}\n%place{each} = add i64 %start{each}, {part * self.lanes}"
            yield from self._store(f"%added{each}", f"%place{each}", each)
        yield "ret void\n}"

    def _load_values(self, name: str, pointer: str, offset: int) -> Iterator[str]:
        """Loads a vector of values as float32. bfloat16 is the upper half of float32."""
        vector, values = self.vector("float"), self.vector(self._value)
        yield f"%{name}.at = getelementptr {self._value}, ptr {pointer}, i64 {offset}"
        if self.arithmetic is Arithmetic.FLOAT32:
            yield f"%{name} = load {values}, ptr %{name}.at, align 4"
            return
        yield f"%{name}.half = load {values}, ptr %{name}.at, align 2"
        yield f"%{name}.wide = zext {values} %{name}.half to {self.vector('i32')}"
        yield f"%{name}.bits = shl {self.vector('i32')} %{name}.wide, {self._all(16)}"
        yield f"%{name} = bitcast {self.vector('i32')} %{name}.bits to {vector}"

    def _load_weights(self) -> Iterator[str]:
        """Loads the weights of two inputs, and prefetches as many. Those of input i and vector j are %weights{i}.{j}.

        In bfloat16, an output's two weights lie side by side: the even input's in the lower half of 32 bits. The upper half
        with zeros below, or the lower half shifted there, is the weight as float32.
        """
        integers, vector = self.vector("i32"), self.vector("float")
        yield f"%place = mul i64 %input, {self.width}"
        yield f"%panel = getelementptr {self._value}, ptr %weights, i64 %place"
        yield from self._prefetch()
        for part in range(VECTORS):
            if self.arithmetic is Arithmetic.FLOAT32:
                for odd in range(2):
                    yield from self._load_values(f"weights{odd}.{part}", "%panel", odd * self.width + part * self.lanes)
                continue
            yield f"%pairs{part}.at = getelementptr i32, ptr %panel, i64 {part * self.lanes}"
            yield f"%pairs{part} = load {integers}, ptr %pairs{part}.at, align 4"
            if self.arithmetic is Arithmetic.WIDENED:
                yield f"%low{part} = shl {integers} %pairs{part}, {self._all(16)}"
                yield f"%high{part} = and {integers} %pairs{part}, {self._all(-65536)}"
                yield f"%weights0.{part} = bitcast {integers} %low{part} to {vector}"
                yield f"%weights1.{part} = bitcast {integers} %high{part} to {vector}"

    def _prefetch(self) -> Iterator[str]:
        """Prefetches as many weights as a step reads."""
        for start in range(0, self.step * self.width * self.arithmetic.weight_bytes, CACHE_LINE):
            yield f"%ahead{start} = getelementptr i8, ptr %panel, i64 {PREFETCHED + start}"
            yield f"call void @llvm.prefetch.p0(ptr %ahead{start}, i32 0, i32 3, i32 1)"

    def _add_products(self, rows: int) -> Iterator[str]:
        """Adds the products of two inputs to all sums: even = fma(weights0, x0, sum), and then added = fma(weights1, x1, even).

        The instruction for pairs of bfloat16 adds both products, as the CPU's manual says.
        """
        if self.arithmetic is Arithmetic.PAIRS:
            yield "%pair = lshr i64 %input, 1"
            for row in range(rows):
                yield from self._broadcast(f"x{row}", "i32", row, "%pair")
                for part in range(VECTORS):
                    operands = f"{self.vector('i32')} %pairs{part}, {self.vector('i32')} %x{row}"
                    dot = f'call {self.vector("float")} asm "vdpbf16ps $2, $1, $0", "=v,v,v,0"'
                    yield f"%added{row}.{part} = {dot}({operands}, {self.vector('float')} %sum{row}.{part})"
            return
        yield "%odd = add i64 %input, 1"
        vector = self.vector("float")
        for index, (input, before, after) in enumerate((("%input", "sum", "even"), ("%odd", "even", "added"))):
            for row in range(rows):
                yield from self._broadcast(f"x{index}.{row}", "float", row, input)
                for part in range(VECTORS):
                    operands = f"{vector} %weights{index}.{part}, {vector} %x{index}.{row}, {vector} %{before}{row}.{part}"
                    yield f"%{after}{row}.{part} = call {vector} @llvm.fma.v{self.lanes}f32({operands})"

    def _broadcast(self, name: str, kind: str, row: int, place: str) -> Iterator[str]:
        """A vector of one value of a row, which is loaded into its first lane and copied to the others."""
        vector = self.vector(kind)
        yield f"%{name}.at = getelementptr {kind}, ptr %row{row}, i64 {place}"
        yield f"%{name}.one = load {kind}, ptr %{name}.at"
        yield f"%{name}.first = insertelement {vector} poison, {kind} %{name}.one, i32 0"
        yield f"%{name} = shufflevector {vector} %{name}.first, {vector} poison, {self.vector('i32')} zeroinitializer"

    def _store(self, total: str, place: str, name: str) -> Iterator[str]:
        """Writes a vector of sums, rounded to the nearest value, and to the even one of two. `name` ends its registers'.

        Bits b of a float32 are rounded to bfloat16 by (b + 0x7FFF + (b >> 16 & 1)) >> 16.
        """
        integers, values = self.vector("i32"), self.vector(self._value)
        yield f"%out{name} = getelementptr {self._value}, ptr %out, i64 {place}"
        if self.arithmetic is Arithmetic.FLOAT32:
            yield f"store {values} {total}, ptr %out{name}, align 4"
            return
        # NaNs stay NaNs: those that arise from bfloat16 have no bits that a carry could start from.
        yield f"%bits{name} = bitcast {self.vector('float')} {total} to {integers}"
        yield f"%upper{name} = lshr {integers} %bits{name}, {self._all(16)}"
        yield f"%parity{name} = and {integers} %upper{name}, {self._all(1)}"
        yield f"%half{name}.0 = add {integers} %parity{name}, {self._all(0x7FFF)}"
        yield f"%sum{name}.0 = add {integers} %bits{name}, %half{name}.0"
        yield f"%rounded{name} = lshr {integers} %sum{name}.0, {self._all(16)}"
        yield f"%value{name} = trunc {integers} %rounded{name} to {values}"
        yield f"store {values} %value{name}, ptr %out{name}, align 2"

    def register(self, name: str) -> None:
        """Compiles the code and registers it, as `outrider.verify.model.cpu.libtorch.register`."""
        register(name, self.width, self.source())
