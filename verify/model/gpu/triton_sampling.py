"""Launches the kernels over logits. Triton is an optional dependency: import this module lazily."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import triton

from outrider.drafters.noise import position_key
from outrider.verify.model.gpu import ranking_kernels, sampling_kernels
from outrider.verify.model.transfer import on_device, to_device
from outrider.verify.sampling_params import SamplingParams

# The tokens of a block, and those that one program reads at once in the end.
BLOCK, CHOICE_BLOCK = 4096, 2048
# The tokens of a block among which one is chosen without filters; with them, all blocks have this room together.
SLOTS, LEAST_ROOM = 32, 4096
WARPS = 4
CHOICE_WARPS = 8
# The low bits of a float32 that are zero if it was converted from another type.
LOW_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}


class Sampled(NamedTuple):
    """Rows whose tokens are sampled."""

    first: int  # row
    params: SamplingParams
    positions: Sequence[int]  # one for each row


@torch.library.custom_op("outrider::likeliest_tokens", mutates_args=())
def likeliest_tokens(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, int32 [M, count], and probabilities, float32 [M, count], of the likeliest tokens of logits [M, V].

    The third result has each block's largest logits, float32 [M, blocks, `count` up to a power of two].
    """
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    rows, vocabulary = logits.shape
    blocks, most = triton.cdiv(vocabulary, BLOCK), triton.next_power_of_2(count)
    values, masses, probabilities = (
        torch.empty(rows, *sizes, device=logits.device) for sizes in ((blocks, most), (blocks,), (count,))
    )
    ids, chosen = (torch.empty(rows, *sizes, dtype=torch.int32, device=logits.device) for sizes in ((blocks, most), (count,)))
    found = {"values": values, "ids": ids, "masses": masses, "count": count, "most": most, "low_bits": LOW_BITS[logits.dtype]}
    with on_device(logits.device):
        ranking_kernels.likeliest_of_block[rows, blocks](
            logits=logits,
            row_stride=logits.stride(0),
            vocabulary=vocabulary,
            block=BLOCK,
            num_warps=CHOICE_WARPS,
            **found,
        )
        ranking_kernels.likeliest[rows,](
            chosen=chosen,
            probabilities=probabilities,
            blocks=blocks,
            most_blocks=triton.next_power_of_2(blocks),
            **found,
        )
    return chosen, probabilities, values


@likeliest_tokens.register_fake
def _(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids, probabilities = (logits.new_empty((len(logits), count), dtype=dtype) for dtype in (torch.int32, torch.float32))
    blocks = triton.cdiv(logits.shape[1], BLOCK), triton.next_power_of_2(count)
    return ids, probabilities, logits.new_empty((len(logits), *blocks), dtype=torch.float32)


@torch.library.custom_op("outrider::choose_tokens", mutates_args=())
def choose_tokens(
    logits: torch.Tensor, values: torch.Tensor, settings: torch.Tensor, draws: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens of each row of logits [M, V], int32 [M, draws], and if there are several, their probabilities, float32.

    Of a row of temperature 0, anything. `values` are of `likeliest_tokens`; `settings` are int64 [5, M], of `settings_of`.
    """
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    chosen, probabilities = (
        torch.empty(len(logits), draws, dtype=dtype, device=logits.device) for dtype in (torch.int32, torch.float32)
    )
    with on_device(logits.device):
        found = kept_tokens(logits, values, settings, draws)
        sampling_kernels.choose[len(logits),](
            **found,
            chosen=chosen,
            probabilities=probabilities,
            blocks=values.shape[1],
            block=CHOICE_BLOCK,
            num_warps=CHOICE_WARPS,
        )
    return chosen, probabilities


def kept_tokens(logits: torch.Tensor, values: torch.Tensor, settings: torch.Tensor, draws: int) -> dict[str, Any]:
    """Launches the kernels that collect the tokens that can be chosen; returns what the last one reads."""
    grid = len(logits), values.shape[1]  # rows and blocks
    room = max(LEAST_ROOM, grid[1] * SLOTS)
    masses = torch.empty(*grid, sampling_kernels.LEVELS.value, dtype=torch.int64, device=logits.device)
    kept, ids = (torch.empty(len(logits), room, dtype=dtype, device=logits.device) for dtype in (logits.dtype, torch.int32))
    shared = {"logits": logits, "row_stride": logits.stride(0), "settings": settings, "values": values, "masses": masses}
    shared |= {"vocabulary": logits.shape[1], "draws": draws, "most": values.shape[2]}
    shared |= {"most_blocks": triton.next_power_of_2(values.shape[1])}
    sampling_kernels.weigh[grid](**shared, block=BLOCK, num_warps=WARPS)
    shared |= {"kept": kept, "ids": ids, "room": room, "low_bits": LOW_BITS[logits.dtype], "slots": SLOTS}
    sampling_kernels.keep[grid](**shared, block=BLOCK, num_warps=CHOICE_WARPS)
    return shared


@choose_tokens.register_fake
def _(logits: torch.Tensor, _: torch.Tensor, __: torch.Tensor, draws: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = len(logits), draws
    return logits.new_empty(shape, dtype=torch.int32), logits.new_empty(shape, dtype=torch.float32)


def likeliest(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`likeliest_tokens`; of equal logits, the smaller id is first."""
    return cast(tuple[torch.Tensor, torch.Tensor, torch.Tensor], likeliest_tokens(logits, count))


def choose(logits: torch.Tensor, values: torch.Tensor, sampled: Sequence[Sampled]) -> torch.Tensor:
    """The tokens of the sampled rows of logits [M, V], as `outrider.verify.sampling.sampler.choose`; int32 [M].

    Other rows get any. `values` are those of `likeliest`.
    """
    settings = to_device(settings_of(len(logits), sampled), logits.device)
    return cast(torch.Tensor, choose_tokens(logits, values, settings, 1)[0][:, 0])


def draw(
    logits: torch.Tensor, params: SamplingParams, positions: Sequence[int], draws: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples tokens without replacement for each row of logits [M, V]: int32 [M, draws], and their probabilities.

    They are the tokens of the best scores; the probabilities, float32, are those before min-p.
    """
    values = likeliest(logits, 1)[2]
    settings = to_device(settings_of(len(logits), [Sampled(0, params, positions)]), logits.device)
    tokens, probabilities = choose_tokens(logits, values, settings, max(2, draws))  # one alone has no probability
    return tokens[:, :draws], probabilities[:, :draws]


def settings_of(rows: int, sampled: Sequence[Sampled]) -> torch.Tensor:
    """The settings of rows, int64 [5, rows], as the kernels read them."""
    settings = np.zeros((5, rows), np.int64)
    fractions, keys = settings.view(np.float64), settings.view(np.uint64)
    fractions[3] = 1.0  # other rows have no filters
    for first, params, positions in sampled:
        at = slice(first, first + len(positions))
        keys[0, at] = [position_key(params.seed, position) for position in positions]
        settings[2, at] = params.top_k
        fractions[1, at], fractions[3, at] = params.temperature, params.top_p
        fractions[4, at] = math.log(params.min_p) if params.min_p else -math.inf
    return torch.from_numpy(settings)
