"""Launches the kernels over logits. Triton is an optional dependency: import this module lazily."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import cast

import torch
import triton

from outrider.drafters.noise import position_key
from outrider.verify.model.gpu import sampling_kernels as kernels
from outrider.verify.model.transfer import on_device, to_device
from outrider.verify.sampling_params import SamplingParams

BLOCK = 4096
WARPS = 16
# Of a program that finds the likeliest tokens of a block.
LIKELIEST_WARPS = 4
# The low bits of a float32 that are zero if it was converted from another type.
LOW_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}


@torch.library.custom_op("outrider::choose_tokens", mutates_args=())
def choose_tokens(
    logits: torch.Tensor,  # [M, V]
    keys: torch.Tensor,  # int64 [M]
    temperature: float,
    top_k: int,  # 0 = all
    top_p: float,
    min_p: float,
) -> torch.Tensor:
    """The token of each row, int64 [M]."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    count, vocabulary = logits.shape
    chosen = torch.empty(count, dtype=torch.int64, device=logits.device)
    with on_device(logits.device):
        kernels.choose[count,](
            logits=logits,
            row_stride=logits.stride(0),
            keys=keys,
            chosen=chosen,
            vocabulary=vocabulary,
            temperature=temperature,
            top_k=top_k,
            top_p_bits=struct.unpack("<q", struct.pack("<d", top_p))[0],
            least_weight=math.log(min_p) if min_p else -math.inf,
            has_top_k=top_k > 0,
            has_top_p=top_p < 1.0,
            low_bits=LOW_BITS[logits.dtype],
            block=BLOCK,
            num_warps=WARPS,
        )
    return chosen


@choose_tokens.register_fake
def _(logits: torch.Tensor, keys: torch.Tensor, *_: float) -> torch.Tensor:
    return torch.empty_like(keys)


def choose(logits: torch.Tensor, params: SamplingParams, positions: Sequence[int]) -> torch.Tensor:
    """As `outrider.verify.sampling.sampler.Sampler.sample`: int64 [M], from logits [M, V]. Not for greedy choices."""
    unsigned = [position_key(params.seed, position) for position in positions]
    keys = to_device(torch.tensor([key - (1 << 64) if key >> 63 else key for key in unsigned]), logits.device)
    found = choose_tokens(logits, keys, params.temperature, params.top_k, params.top_p, params.min_p)
    return cast(torch.Tensor, found)


@torch.library.custom_op("outrider::likeliest_tokens", mutates_args=())
def likeliest_tokens(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids, int32 [M, count], and probabilities, float32 [M, count], of the likeliest tokens of logits [M, V]."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    rows, vocabulary = logits.shape
    blocks, most = triton.cdiv(vocabulary, BLOCK), triton.next_power_of_2(count)
    values, masses, probabilities = (
        torch.empty(rows, *sizes, device=logits.device) for sizes in ((blocks, most), (blocks,), (count,))
    )
    ids, chosen = (torch.empty(rows, *sizes, dtype=torch.int32, device=logits.device) for sizes in ((blocks, most), (count,)))
    found = {"values": values, "ids": ids, "masses": masses, "count": count, "most": most}
    with on_device(logits.device):
        kernels.likeliest_of_block[rows, blocks](
            logits=logits,
            row_stride=logits.stride(0),
            vocabulary=vocabulary,
            block=BLOCK,
            num_warps=LIKELIEST_WARPS,
            **found,
        )
        kernels.likeliest[rows,](
            chosen=chosen,
            probabilities=probabilities,
            blocks=blocks,
            most_blocks=triton.next_power_of_2(blocks),
            **found,
        )
    return chosen, probabilities


@likeliest_tokens.register_fake
def _(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = len(logits), count
    return logits.new_empty(shape, dtype=torch.int32), logits.new_empty(shape, dtype=torch.float32)


def likeliest(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As `outrider.verify.sampling.largest.likeliest`; of equal logits, the smaller id is first."""
    return cast(tuple[torch.Tensor, torch.Tensor], likeliest_tokens(logits, count))
