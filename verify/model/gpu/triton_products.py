"""Linear layers of weights of 16 bits and fewer, each as one operation, whose rows have the same bits in any number of rows.

PyTorch's products choose a kernel by the number of rows, so a row's bits depend on it. Triton is an optional dependency: import
this module lazily.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from functools import cache
from typing import Any, NamedTuple, cast

import torch
import triton

from outrider.verify.model.gpu import product_kernels as kernels
from outrider.verify.model.gpu.row_counts import ROWS
from outrider.verify.model.gpu.text_work import capability
from outrider.verify.model.transfer import on_device

TYPES = (torch.bfloat16, torch.float16)
# The tile size of the tensor cores, and the most rows of one tile: with more, registers do not suffice.
LEAST_ROWS, MOST_ROWS = 16, 128
# The numbers of outputs of a tile, and the most rows with which a tile of the largest one fits into the registers of any GPU.
OUTPUTS, FEW_ROWS = (64, 128, 256), 80
# The compute capabilities of Hopper, and of Blackwell for data centres.
ROOMY = (90, 100, 103)
# The inputs that a program multiplies at once, and the most blocks of them that it reads ahead.
INPUTS, MOST_STAGES = 128, 4
# Inputs are split until a layer has PROGRAMS programs of SPLIT_OUTPUTS outputs, which keep a large GPU busy.
PROGRAMS, SPLIT_OUTPUTS = 96, 128


class Gpu(NamedTuple):
    """The properties of a GPU that decide the sizes of tiles."""

    multiprocessors: int
    shared_bytes: int  # of a program, without what the compiler adds
    capability: int  # as `outrider.verify.model.gpu.text_work.capability`

    def fits(self, rows: int, bits: int) -> bool:
        """Whether a tile of 256 outputs and `rows` rows fits into the registers, for weights of `bits` bits.

        Tensor cores of Hopper and Blackwell read their inputs from shared memory, so fewer registers are needed there.
        Unpacking weights of 4 bits needs additional registers.
        """
        is_roomy = self.capability in ROOMY
        return is_roomy and rows <= FEW_ROWS if bits == 4 else rows <= (MOST_ROWS if is_roomy else FEW_ROWS)


class Tile(NamedTuple):
    """The sizes of a program's work; none of them changes a row's bits."""

    rows: int
    more_rows: int  # of the second block
    outputs: int
    inputs: int
    warps: int

    @staticmethod
    def of(count: int, outputs: int, splits: int, gpu: Gpu, bits: int = 16, itemsize: int = 2) -> Tile:
        """The tile for a product of `count` rows. `itemsize` is the size in bytes of an element of the rows.

        Weights are read from memory once, but each tile reads the rows again, from the L2 cache. With many rows, this traffic
        limits the product, so the tile is chosen for which the busiest multiprocessor reads the fewest bytes. With few rows,
        many small programs hide the latency of memory better.
        """
        rows, more_rows = min(MOST_ROWS, max(LEAST_ROWS, triton.next_power_of_2(count))), 0
        if 0 < count - rows // 2 <= LEAST_ROWS < rows // 2:
            rows, more_rows = rows // 2, LEAST_ROWS
        elif 0 < count - MOST_ROWS <= LEAST_ROWS:
            more_rows = LEAST_ROWS

        def tile(size: int) -> Tile:
            inputs = INPUTS // 2 if size > OUTPUTS[0] or rows == MOST_ROWS else INPUTS
            if bits == 4:
                inputs = INPUTS  # whole blocks of bytes, which are multiplied in halves
            elif itemsize > 2:
                inputs = INPUTS // 2  # products of float32 are three of TF32, each over a whole block
            return Tile(rows, more_rows, size, inputs, 4 if size == OUTPUTS[0] else 8)

        if rows == LEAST_ROWS:
            return tile(OUTPUTS[0])
        sizes = OUTPUTS if itemsize == 2 and gpu.fits(rows + more_rows, bits) else OUTPUTS[:2]
        return min(map(tile, sizes), key=lambda each: each.busiest_bytes(count, outputs, splits, gpu, bits, itemsize))

    def busiest_bytes(self, count: int, outputs: int, splits: int, gpu: Gpu, bits: int = 16, itemsize: int = 2) -> int:
        """The bytes, of weights and rows, that the busiest multiprocessor reads for each input feature of a program."""
        rows = self.rows + self.more_rows
        programs = splits * -(-outputs // self.outputs) * -(-count // rows)
        return -(-programs // gpu.multiprocessors) * (self.outputs * bits // 8 + min(count, rows) * itemsize)

    def block_bytes(self, bits: int = 16, itemsize: int = 2) -> int:
        """Bytes of shared memory for one block of inputs. `itemsize` is that of the rows."""
        return self.inputs * (self.outputs * bits // 8 + (self.rows + self.more_rows) * itemsize)

    def stages(self, shared_bytes: int, block_bytes: int) -> int:
        """How many blocks are read ahead."""
        return max(2, min(MOST_STAGES, shared_bytes // block_bytes))


@cache
def gpu_of(device: torch.device) -> Gpu:
    """The GPU's figures; an H200's without one."""
    if device.type != "cuda":
        return Gpu(132, 226 << 10, 90)
    properties: Any = torch.cuda.get_device_properties(device)
    return Gpu(properties.multi_processor_count, properties.shared_memory_per_block_optin - 1024, capability(device))


def splits_of(inputs: int, outputs: int) -> int:
    """Into how many parts a layer's inputs are cut; this depends on nothing else, because it decides the order of sums."""
    splits = 1
    while triton.cdiv(outputs, SPLIT_OUTPUTS) * splits < PROGRAMS and 2 * splits * INPUTS <= inputs:
        splits *= 2
    return splits


def _multiply(
    rows: torch.Tensor,
    weight: torch.Tensor,
    bits: int,
    bias: torch.Tensor | None,
    arrived: torch.Tensor,
    **scales: torch.Tensor,
) -> torch.Tensor:
    """Launches the kernel."""
    flat = rows.reshape(-1, rows.shape[-1])
    flat = flat if flat.stride(1) == 1 else flat.contiguous()
    count, inputs = flat.shape
    outputs = len(weight)
    splits, gpu = splits_of(inputs, outputs), gpu_of(rows.device)
    tile = Tile.of(count, outputs, splits, gpu, bits, rows.itemsize)
    out = torch.empty(*rows.shape[:-1], outputs, dtype=rows.dtype, device=rows.device)
    partial = torch.empty(splits * count * outputs if splits > 1 else 0, dtype=torch.float32, device=rows.device)
    grid = (triton.cdiv(outputs, tile.outputs), triton.cdiv(count, tile.rows + tile.more_rows), splits)
    if splits > 1 and len(arrived) < grid[0] * grid[1]:  # a picture in one forward
        arrived = arrived.new_zeros(grid[0] * grid[1])
    with on_device(rows.device):
        kernels.multiply[grid](
            rows=flat,
            row_stride=flat.stride(0),
            weight=weight,
            **({"scales": weight, "minimums": weight} | scales),
            bias=weight if bias is None else bias,
            out=out,
            partial=partial,
            arrived=arrived,
            count=count,
            outputs=outputs,
            inputs=inputs,
            bits=bits,
            has_bias=bias is not None,
            block_rows=tile.rows,
            more_rows=tile.more_rows,
            block_outputs=tile.outputs,
            block_inputs=tile.inputs,
            splits=splits,
            split_inputs=INPUTS * triton.cdiv(triton.cdiv(inputs, INPUTS), splits),
            num_warps=tile.warps,
            num_stages=tile.stages(gpu.shared_bytes, tile.block_bytes(bits, rows.itemsize)),
        )
    return out


@torch.library.custom_op("outrider::linear", mutates_args=())  # `arrived` is as before once the kernel ends
def linear(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, arrived: torch.Tensor) -> torch.Tensor:
    """Rows, [..., inputs], to outputs, [..., outputs]. `arrived` is the layer's, from `counters`."""
    return _multiply(rows, weight, 16, bias, arrived)


@torch.library.custom_op("outrider::linear_8_bits", mutates_args=())
def linear_8_bits(
    rows: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, arrived: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """`linear` with the weights of `outrider.verify.model.gpu.quantized.Blocks` of 8 bits."""
    return _multiply(rows, values, 8, bias, arrived, scales=scales)


@torch.library.custom_op("outrider::linear_4_bits", mutates_args=())
def linear_4_bits(
    rows: torch.Tensor,
    values: torch.Tensor,
    scales: torch.Tensor,
    minimums: torch.Tensor,
    arrived: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """The same of 4 bits."""
    return _multiply(rows, values, 4, bias, arrived, scales=scales, minimums=minimums)


@linear.register_fake
@linear_8_bits.register_fake
@linear_4_bits.register_fake
def _(rows: torch.Tensor, weight: torch.Tensor, *_: torch.Tensor | None) -> torch.Tensor:
    return rows.new_empty(*rows.shape[:-1], len(weight))


def counters(outputs: int, device: torch.device) -> torch.Tensor:
    """Int32 zeros, one for each tile of a forward's outputs: how many splits have been computed.

    A layer has its own, since another layer's product may run at the same time, as a draft model's does beside the target's.
    """
    return torch.zeros(triton.cdiv(outputs, OUTPUTS[0]) * triton.cdiv(ROWS[-1], MOST_ROWS), dtype=torch.int32, device=device)


def counters_of(*modules: torch.nn.Module) -> list[torch.Tensor]:
    """The counters of these modules' layers: of KernelLinear, and of quantised ones."""
    layers = (layer for module in modules for layer in module.modules())
    return [cast(torch.Tensor, layer.arrived) for layer in layers if hasattr(layer, "arrived")]


class KernelLinear(torch.nn.Linear):
    """A linear layer that the kernel computes."""

    arrived: torch.Tensor  # from `counters`

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, linear(rows, self.weight, self.bias, self.arrived))

    def apart(self) -> KernelLinear:
        """The layer for products that may run beside this one's: the same weights, and counters of its own."""
        found = copy(self)
        found.arrived = torch.zeros_like(self.arrived)
        return found


def use_kernel(layers: Iterable[torch.nn.Linear]) -> None:
    """The layers whose weights have 16 bits are computed by the kernel from now on; they keep their weights."""
    for layer in layers:
        if layer.weight.dtype in TYPES:
            layer.__class__ = KernelLinear
            cast(KernelLinear, layer).arrived = counters(layer.out_features, layer.weight.device)
