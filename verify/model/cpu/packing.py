"""Linear layers with weights that are packed for oneDNN.

The usual matrix product repacks the weights in every call, which dominates when a forward has only a few dozen rows. Packing
once avoids that. Results are equal up to rounding.

oneDNN compiles a kernel for each number of rows and keeps the latest 1,024, a few hundred kB each. Chunks of a prompt have any
length, so many rows are padded to a few dozen sizes: memory stays bounded, and kernels are compiled once.
"""

from __future__ import annotations

import torch

from outrider.verify.model.packed import PackedLayer
from outrider.verify.model.private_torch import multiply_onednn, pack_onednn

# Up to this many rows, each number of rows has a kernel of its own.
EXACT_ROWS = 65
# The layout is optimised for this many rows: one token and a small tree.
ROWS = 16


def padded_count(count: int, exact: int = EXACT_ROWS) -> int:
    """The number of rows that a product of `count` rows has. Small trees are not padded, other rows by an eighth at most."""
    if count <= exact:
        return count
    step = 8
    while 16 * step < count:
        step *= 2
    return (count + step - 1) // step * step


def multiply(rows: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """[..., N, in_features] to [..., N, out_features]. Scriptable."""
    count = rows.size(-2)
    padding = padded_count(count) - count
    if padding > 0:
        rows = torch.nn.functional.pad(rows, [0, 0, 0, padding])
    result = multiply_onednn(rows, packed, bias)
    return result.narrow(-2, 0, count) if padding > 0 else result


class PackedLinear(PackedLayer):
    """A layer with the weights of the linear layer, packed."""

    kernel = "oneDNN"

    def __init__(self, linear: torch.nn.Linear) -> None:
        weight = linear.weight.detach()
        super().__init__(multiply, linear, pack_onednn(weight, ROWS))
        self.nbytes = weight.nbytes
