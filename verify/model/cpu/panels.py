"""Linear layers with weights in panels, multiplied by machine code of our own (`outrider.verify.model.cpu.panel_kernel`).

A row has the same bits beside any number of other rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from outrider.verify.model.cpu import llvm
from outrider.verify.model.cpu.panel_kernel import Arithmetic, Kernel
from outrider.verify.model.cpu.tile_kernel import TileKernel
from outrider.verify.model.packed import PackedLayer
from outrider.verify.model.private_torch import enable_amx

# Lanes of a vector, and rows of a block: with 32 registers of 512 bits, and with 16 of 256 bits.
AVX512, AVX2 = (16, 11), (8, 5)
# A block of AMX is two tiles of rows.
AMX = (16, 32)
# The features that the CPU must have.
NEEDED = {Arithmetic.PAIRS: ("avx512bf16",), Arithmetic.TILES: ("amx-bf16", "avx512f")}


def multiply_float32(rows: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiplies rows [..., in_features] by the packed weights and returns [..., out_features]; TorchScript can compile it."""
    out, added, count = prepare(rows, packed, bias)
    torch.ops.outrider.multiply_float32(packed, rows.contiguous(), added, out, count, rows.size(-1), out.size(-1))
    return out


def multiply_widened(rows: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """As `multiply_float32`, by `Arithmetic.WIDENED`."""
    out, added, count = prepare(rows, packed, bias)
    torch.ops.outrider.multiply_widened(packed, rows.contiguous().float(), added, out, count, rows.size(-1), out.size(-1))
    return out


def multiply_pairs(rows: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """As `multiply_float32`, by `Arithmetic.PAIRS`."""
    out, added, count = prepare(rows, packed, bias)
    torch.ops.outrider.multiply_pairs(packed, rows.contiguous(), added, out, count, rows.size(-1), out.size(-1))
    return out


def multiply_tiles(rows: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """As `multiply_float32`, by `Arithmetic.TILES`."""
    out, added, count = prepare(rows, packed, bias)
    torch.ops.outrider.multiply_tiles(packed, rows.contiguous(), added, out, count, rows.size(-1), out.size(-1))
    return out


def prepare(rows: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, int]:
    """The tensor that the product is written to, the bias (empty if there is none), and the number of rows."""
    shape = list(rows.size())
    shape[-1] = packed.size(0) * packed.size(2)
    assert rows.size(-1) * shape[-1] == packed.numel(), "Rows and weights do not have the same number of inputs."
    return packed.new_empty(shape), packed.new_empty(0) if bias is None else bias, rows.numel() // rows.size(-1)


MULTIPLY: dict[Arithmetic, Callable[..., torch.Tensor]] = {
    Arithmetic.FLOAT32: multiply_float32,
    Arithmetic.WIDENED: multiply_widened,
    Arithmetic.PAIRS: multiply_pairs,
    Arithmetic.TILES: multiply_tiles,
}


@cache
def kernel(arithmetic: Arithmetic) -> Kernel | None:
    """This CPU's kernel, compiled and registered; None if it cannot be."""
    if not all(map(llvm.has, NEEDED.get(arithmetic, ()))):
        return None
    is_tiled = arithmetic is Arithmetic.TILES
    if is_tiled and not enable_amx():
        return None
    size = AVX512 if llvm.has("avx512f") else AVX2
    found = TileKernel(arithmetic, *AMX) if is_tiled else Kernel(arithmetic, *size)
    try:
        found.register(f"multiply_{arithmetic}")
    except (RuntimeError, AttributeError, OSError):  # not in this version or build of LLVM or PyTorch
        return None
    return found


class PanelLinear(PackedLayer):
    """A layer with the weights of the linear layer in panels."""

    def __init__(self, linear: torch.nn.Linear, arithmetic: Arithmetic) -> None:
        """Requires `fits`."""
        weight, found = linear.weight.detach(), kernel(arithmetic)
        assert found is not None
        super().__init__(MULTIPLY[arithmetic], linear, in_panels(weight, found))
        self.nbytes, self.kernel = weight.nbytes, f"panels, {arithmetic}"


def fits(linear: torch.nn.Linear, arithmetic: Arithmetic) -> bool:
    """Whether this CPU has a kernel of the arithmetic, which takes a layer of this shape."""
    found = kernel(arithmetic)
    return found is not None and linear.in_features % found.step == 0 and linear.out_features % found.width == 0


def in_panels(weight: torch.Tensor, kernel: Kernel) -> torch.Tensor:
    """Weights [outputs, inputs] in the order in which the kernel reads them.

    [panels, inputs, width] in float32, and [panels, inputs / 2, width, 2] in bfloat16.
    """
    panels = weight.view(-1, kernel.width, weight.size(1))
    if kernel.arithmetic is not Arithmetic.FLOAT32:
        panels = panels.view(len(panels), kernel.width, -1, 2)
    return panels.transpose(1, 2).contiguous()
