"""Mixtures of experts as operations: what a row chooses, and what they make of it, with the same bits in any number of rows.

Triton is an optional dependency: import this module lazily.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton

from outrider.verify.model.gpu import expert_kernels as kernels
from outrider.verify.model.gpu.forms import sizes_of
from outrider.verify.model.gpu.tiles import INPUTS, LEAST_ROWS, Tile, gpu_of
from outrider.verify.model.transfer import on_device

# Outputs of a tile; of gate and up, half of them are of each. Weights are read once, so the tile is the tensor cores' smallest.
OUTPUTS = 64
# The most slots of a tile.
MOST_SLOTS = 64
# The most blocks of inputs that a program reads ahead, and the programs whose blocks a multiprocessor holds.
MOST_STAGES, RESIDENT = 6, 2
# Inputs of down are split until a single row has this many programs, and into at most MOST_SPLITS.
PROGRAMS, MOST_SPLITS = 192, 4
# The rows whose experts a program adds at once.
ADDED_ROWS = 16
# A mixture's ways to join gate and up, by name.
WAYS = {"silu": kernels.SILU, "gelu": kernels.GELU, "gelu_tanh": kernels.GELU_TANH, "clamped": kernels.CLAMPED}


class Work(NamedTuple):
    """What the programs of a mixture compute."""

    pieces: int  # at most; a grid's size
    tile: int  # the most slots of a piece


def work_of(rows: int, chosen: int, experts: int) -> Work:
    """The pieces of `rows` rows that choose `chosen` of the experts each. Neither number changes a row's bits."""
    slots = rows * chosen
    tile = min(MOST_SLOTS, max(LEAST_ROWS, triton.next_power_of_2(2 * slots // experts)))
    return Work(min(slots, min(experts, slots) + slots // tile), tile)


def splits_of(inputs: int, outputs: int, chosen: int) -> int:
    """Into how many parts the inputs of down are cut; this depends on nothing else, because it decides the order of sums."""
    splits = 1
    while splits < MOST_SPLITS and triton.cdiv(outputs, OUTPUTS) * chosen * splits < PROGRAMS and 4 * splits * INPUTS <= inputs:
        splits *= 2
    return splits


@torch.library.custom_op("outrider::choose_experts", mutates_args=())
def choose_experts(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    chosen: int,
    is_sigmoid: bool,
    is_normed: bool,
    epsilon: float,
    scale: float,
    dtype: torch.dtype,
    groups: int = 1,
    used_groups: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Shares of `dtype` and numbers, int64, of the experts that each row of the logits chooses, the best first: [N, chosen].

    Scores are a softmax or a sigmoid of the logits; `bias`, float32 [experts], is added to choose alone. Of several groups, a
    row uses those with the best expert, or with sigmoids the best two (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).
    """
    logits = logits.contiguous()
    rows, experts = logits.shape
    shares = torch.empty(rows, chosen, dtype=dtype, device=logits.device)
    index = torch.empty(rows, chosen, dtype=torch.int64, device=logits.device)
    with on_device(logits.device):
        kernels.choose[(rows,)](
            logits=logits,
            bias=logits if bias is None else bias,
            shares=shares,
            index=index,
            experts=experts,
            chosen=chosen,
            padded_experts=triton.next_power_of_2(experts),
            padded_chosen=triton.next_power_of_2(chosen),
            is_sigmoid=is_sigmoid,
            has_bias=bias is not None,
            is_normed=is_normed,
            epsilon=epsilon,
            scale=scale,
            groups=groups,
            padded_groups=triton.next_power_of_2(groups),
            used=used_groups,
            summed=2 if is_sigmoid else 1,
            num_warps=1,
        )
    return shares, index


@choose_experts.register_fake
def _(logits: torch.Tensor, bias: torch.Tensor | None, chosen: int, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (len(logits), chosen)
    return logits.new_empty(shape, dtype=others[4]), logits.new_empty(shape, dtype=torch.int64)


@torch.library.custom_op("outrider::experts", mutates_args=())  # `arrived` is as before; nothing reads `touched`
def experts(
    rows: torch.Tensor,
    index: torch.Tensor,
    shares: torch.Tensor,
    gate_up: Sequence[torch.Tensor | None],
    down: Sequence[torch.Tensor | None],
    biases: Sequence[torch.Tensor],
    arrived: torch.Tensor,
    touched: torch.Tensor,
    way: str,
    in_turns: bool,
    alpha: float,
    limit: float,
) -> torch.Tensor:
    """Rows, [N, hidden], by the experts `index`, [N, chosen], that have these `shares` in the result, [N, hidden].

    Weights are a tensor of 16 bits and three None, or the planes of `outrider.verify.model.gpu.quantized.Blocks`: of gate and
    up [experts * 2 * width, hidden], and of down [experts * hidden, width]. Biases are of both or none. `arrived` is from
    `counters`; to `touched`, int32 [1], the number of experts that several rows use is added. `way` is one of WAYS; with
    `in_turns`, outputs of gate and up take turns.
    """
    rows, index, shares = rows if rows.stride(-1) == 1 else rows.contiguous(), index.contiguous(), shares.contiguous()
    (count, hidden), chosen, (both, *_), (last, *_) = rows.shape, index.shape[1], gate_up, down
    assert both is not None and last is not None
    number, slots = len(last) // hidden, count * chosen
    width, work = len(both) // (2 * number), work_of(count, chosen, number)
    joined, out, splits = rows.new_empty(slots, width), rows.new_empty(rows.shape), splits_of(width, hidden, chosen)
    partial = torch.empty(splits * slots * hidden, dtype=torch.float32, device=rows.device)
    shared: dict[str, Any] = {"slots": slots, "experts": number, "chosen": chosen, "is_single": count == 1, "tile": work.tile}
    join = {"in_turns": in_turns, "how": WAYS[way], "alpha": alpha, "limit": limit}
    with on_device(rows.device):
        shared |= {"block_outputs": OUTPUTS, "has_bias": bool(biases)} | _listed(index, work, number, touched)
        kernels.gate_up[(triton.cdiv(2 * width, OUTPUTS), work.pieces)](
            rows=rows,
            row_stride=rows.stride(0),
            out=joined,
            outputs=width,
            **join,
            **shared,
            **_sizes(gate_up, biases[:1], hidden, work.tile, rows),
        )
        kernels.down[(triton.cdiv(hidden, OUTPUTS), work.pieces, splits)](
            rows=joined,
            shares=shares,
            partial=partial,
            arrived=arrived,
            out=out,
            outputs=hidden,
            splits=splits,
            split_inputs=INPUTS * triton.cdiv(triton.cdiv(width, INPUTS), splits),
            added_rows=min(ADDED_ROWS, triton.next_power_of_2(count)),
            **shared,
            **_sizes(down, biases[1:], width, work.tile, rows),
        )
    return out


@experts.register_fake
def _(rows: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(rows, memory_format=torch.contiguous_format)


def _listed(index: torch.Tensor, work: Work, experts: int, touched: torch.Tensor) -> dict[str, torch.Tensor]:
    """The list of the pieces, as kernels take it; that of a single row is not read."""
    listed = torch.empty(work.pieces * int(kernels.WORK_FIELDS.value), dtype=torch.int32, device=index.device)
    order = torch.empty(index.numel(), dtype=torch.int32, device=index.device)
    if len(index) > 1:
        kernels.list_work[(triton.cdiv(experts, int(kernels.LISTED.value)),)](
            index, order, listed, touched, index.numel(), work.pieces, experts, triton.next_power_of_2(experts + 1), work.tile
        )
    return {"index": index, "order": order, "work": listed}


def _sizes(
    weights: Sequence[torch.Tensor | None], bias: Sequence[torch.Tensor], inputs: int, tile: int, rows: torch.Tensor
) -> dict[str, Any]:
    """Arguments of a product's kernel, and options of its launch."""
    values, scales, minimums, factors = weights
    assert values is not None
    (bits, group), gpu = sizes_of(values, scales, inputs), gpu_of(rows.device)
    sizes = Tile(tile, 0, OUTPUTS, INPUTS if rows.itemsize == 2 or bits < 16 else INPUTS // 2, 4)
    found: dict[str, Any] = {"weight": values, "scales": scales, "minimums": minimums, "factors": factors}
    found |= {"bias": [*bias, rows][0], "inputs": inputs, "bits": bits, "group": group}
    block_bytes = sizes.block_bytes(8 * values.itemsize if bits == 16 else bits, rows.itemsize)
    stages = max(2, min(MOST_STAGES, gpu.shared_bytes // RESIDENT // block_bytes))  # blocks that a program reads ahead
    return found | {"block_inputs": sizes.inputs, "num_warps": sizes.warps, "num_stages": stages}


def counters(hidden: int, device: torch.device) -> torch.Tensor:
    """Int32 zeros, one for each tile of a mixture's outputs: how many programs have computed their part of it."""
    return torch.zeros(triton.cdiv(hidden, OUTPUTS), dtype=torch.int32, device=device)
