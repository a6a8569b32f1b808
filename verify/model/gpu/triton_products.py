"""Linear layers of weights of 16 bits and fewer, each as one operation, whose rows have the same bits in any number of rows.

PyTorch's products choose a kernel by the number of rows, so a row's bits depend on it. Triton is an optional dependency: import
this module lazily.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import copy
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import triton

from outrider.verify.model.gpu import product_kernels as kernels
from outrider.verify.model.gpu.forms import sizes_of
from outrider.verify.model.gpu.text_work import ROWS, capability
from outrider.verify.model.gpu.tiles import INPUTS, MOST_ROWS, OUTPUTS, Product, Tile, gpu_of, tuning_of
from outrider.verify.model.transfer import on_device

TYPES = (torch.bfloat16, torch.float16)
# The lines of each output's weights that a program fetches before it may read rows.
AHEAD = 8
# The columns of a part of a row's sum of squares; the columns of a token that a program embeds.
SUMMED, EMBEDDED = kernels.SUMMED.value, 512
# Inputs are split until a layer has PROGRAMS programs of SPLIT_OUTPUTS outputs, which keep a large GPU busy.
PROGRAMS, SPLIT_OUTPUTS = 96, 128


def splits_of(inputs: int, outputs: int) -> int:
    """Into how many parts a layer's inputs are cut; this depends on nothing else, because it decides the order of sums."""
    splits = 1
    while triton.cdiv(outputs, SPLIT_OUTPUTS) * splits < PROGRAMS and 2 * splits * INPUTS <= inputs:
        splits *= 2
    return splits


def split_of(inputs: int, outputs: int) -> int:
    """The inputs of each of these parts, whole blocks."""
    return -(-inputs // (INPUTS * splits_of(inputs, outputs))) * INPUTS


class Weights(NamedTuple):
    """Weights of a linear layer, [outputs, inputs]; in 8 or 4 bits those of `outrider.verify.model.gpu.quantized.Blocks`."""

    values: torch.Tensor
    scales: torch.Tensor | None
    minimums: torch.Tensor | None
    factors: torch.Tensor | None
    bias: torch.Tensor | None
    arrived: torch.Tensor  # from `counters`; as before once a product ends
    split: int  # from `split_of` for the whole layer, of which this may be a part


def overlap(device: torch.device) -> dict[str, Any]:
    """The arguments of a launch that may begin before the kernel before it has ended: programmatic dependent launch."""
    overlaps = capability(device) >= 90
    return {"pdl": overlaps} | ({"launch_pdl": True} if overlaps else {})


def multiply(rows: torch.Tensor, weights: Weights, out: torch.Tensor, epilogue: int, **others: Any) -> None:
    """Launches the kernel. `others` are the arguments of the norm before and of the epilogue."""
    flat = rows.reshape(-1, rows.shape[-1])
    flat = flat if flat.stride(1) == 1 else flat.contiguous()
    (count, inputs), outputs, gpu = flat.shape, len(weights.values), gpu_of(rows.device)
    bits, group = sizes_of(weights.values, weights.scales, inputs)
    is_normed = others.get("sums") is not None
    is_plain = epilogue == kernels.PLAIN.value and not is_normed
    rule = Tile.of(count, outputs, triton.cdiv(inputs, weights.split), gpu, bits, rows.itemsize, is_plain)
    product = Product(inputs, outputs, bits, group, rule.rows, rule.more_rows, epilogue, is_normed)
    launch, tuning = partial(_launch, flat, weights, out, epilogue, others), tuning_of(rows.device)
    if "mailboxes" not in others:  # or the ranks would not publish equally often
        tuning.note(product, [rule, *rule.others(gpu, bits, rows.itemsize)], launch)
    launch(tuning.tile(product, rule))


def _launch(
    flat: torch.Tensor, weights: Weights, out: torch.Tensor, epilogue: int, others: Mapping[str, Any], tile: Tile
) -> None:
    """`multiply` of rows [N, inputs] by this tile."""
    (count, inputs), outputs, bias, arrived = flat.shape, len(weights.values), weights.bias, weights.arrived
    bits, group = sizes_of(weights.values, weights.scales, inputs)
    overlaps, splits, sums = overlap(flat.device), triton.cdiv(inputs, weights.split), others.get("sums")
    partial_size = splits * count * outputs if splits > 1 and epilogue != kernels.PARTS.value else 0
    grid = (triton.cdiv(outputs, tile.outputs), triton.cdiv(count, tile.rows + tile.more_rows), splits)
    if splits > 1 and len(arrived) < grid[0] * grid[1]:  # a picture in one forward
        arrived = arrived.new_zeros(grid[0] * grid[1])
    unused = dict.fromkeys(("residual", "gain", "gained", "next_sums", "mailboxes", "state"), flat)
    alone = {"rank": 0, "room": 1, "first": 0, "ranks": 1}
    with on_device(flat.device):
        kernels.multiply[grid](
            rows=flat,
            row_stride=flat.stride(0),
            weight=weights.values,
            scales=weights.scales,
            minimums=weights.minimums,
            factors=weights.factors,
            bias=flat if bias is None else bias,
            out=out,
            partial=torch.empty(partial_size, dtype=torch.float32, device=flat.device),
            arrived=arrived,
            count=count,
            outputs=outputs,
            inputs=inputs,
            bits=bits,
            group=group,
            has_bias=bias is not None,
            block_rows=tile.rows,
            more_rows=tile.more_rows,
            block_outputs=tile.outputs,
            block_inputs=tile.inputs,
            splits=splits,
            split_inputs=weights.split,
            levels=-1 if sums is None else (inputs // SUMMED - 1).bit_length(),
            epilogue=epilogue,
            num_warps=tile.warps,
            num_stages=tile.stages(gpu_of(flat.device).shared_bytes, tile.block_bytes(bits, flat.itemsize)),
            ahead=AHEAD if overlaps["pdl"] else 0,
            **{"epsilon": 0.0, **unused, **alone, **others, "sums": flat if sums is None else sums},
            **overlaps,
        )


@torch.library.custom_op("outrider::linear", mutates_args=())
def linear(
    rows: torch.Tensor,
    values: torch.Tensor,
    scales: torch.Tensor | None,
    minimums: torch.Tensor | None,
    factors: torch.Tensor | None,
    bias: torch.Tensor | None,
    arrived: torch.Tensor,
    split: int,
    sums: torch.Tensor | None = None,
    epsilon: float = 0.0,
    is_gated: bool = False,
) -> torch.Tensor:
    """Rows, [..., inputs], to outputs, [..., outputs], by `Weights`.

    With `sums`, float32 [N, inputs / SUMMED], the rows are the residual times the gain of a norm: outputs are divided by the
    root mean squares that `sums` are parts of. If `is_gated`, outputs are gates and values in turns, and half as many numbers
    are returned: SiLU of a gate times its value (Shazeer, GLU Variants Improve Transformer, arXiv 2002.05202, equation 5).
    """
    weights = Weights(values, scales, minimums, factors, bias, arrived, split)
    outputs = len(values) // 2 if is_gated else len(values)
    out = torch.empty(*rows.shape[:-1], outputs, dtype=rows.dtype, device=rows.device)
    multiply(rows, weights, out, kernels.SWIGLU.value if is_gated else kernels.PLAIN.value, sums=sums, epsilon=epsilon)
    return out


@linear.register_fake
def _(rows: torch.Tensor, values: torch.Tensor, *others: Any, is_gated: bool = False, **_: Any) -> torch.Tensor:
    is_gated = is_gated or (len(others) == 9 and others[8])
    return rows.new_empty(*rows.shape[:-1], len(values) // 2 if is_gated else len(values))


@torch.library.custom_op("outrider::linear_residual", mutates_args=())
def linear_residual(
    rows: torch.Tensor,
    values: torch.Tensor,
    scales: torch.Tensor | None,
    minimums: torch.Tensor | None,
    factors: torch.Tensor | None,
    bias: torch.Tensor | None,
    arrived: torch.Tensor,
    split: int,
    residual: torch.Tensor,
    gain: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The residual, [N, outputs], plus these rows' outputs; and what `linear` takes of it: itself times `gain`, and sums."""
    weights = Weights(values, scales, minimums, factors, bias, arrived, split)
    found = states_like(residual)
    out, gained, sums = found
    others = {"residual": residual, "gain": gain, "gained": gained, "next_sums": sums}
    multiply(rows, weights, out, kernels.RESIDUAL.value, **others)
    return found


@linear_residual.register_fake
def _(rows: torch.Tensor, values: torch.Tensor, *others: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return states_like(others[6])


def states_like(residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Memory for a residual, for what the next norm multiplies, and for the parts of its sums of squares."""
    count, width = residual.shape
    sums = torch.empty(count, width // SUMMED, dtype=torch.float32, device=residual.device)
    return torch.empty_like(residual), torch.empty_like(residual), sums


@torch.library.custom_op("outrider::embed", mutates_args=())
def embed(tokens: torch.Tensor, table: torch.Tensor, gain: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, int64 [N], to the residual, and what `linear` takes of it, as `linear_residual`."""
    found = states_like(table.new_empty(len(tokens), table.shape[1]))
    out, gained, sums = found
    with on_device(table.device):
        kernels.embed[triton.cdiv(table.shape[1], EMBEDDED), len(tokens)](
            tokens=tokens,
            table=table,
            gain=gain,
            out=out,
            gained=gained,
            sums=sums,
            count=len(tokens),
            width=table.shape[1],
            block=EMBEDDED,
            **overlap(table.device),
        )
    return found


@embed.register_fake
def _(tokens: torch.Tensor, table: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return states_like(table.new_empty(len(tokens), table.shape[1]))


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
    split: int  # as in `Weights`

    @property
    def weights(self) -> Weights:
        return Weights(self.weight, None, None, None, self.bias, self.arrived, self.split)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, linear(rows, *self.weights))

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
            cast(KernelLinear, layer).split = split_of(layer.in_features, layer.out_features)
