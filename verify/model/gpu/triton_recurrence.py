"""Launches the kernels of recurrent layers as operations, which torch.compile and CUDA graphs take as they are.

`outrider.verify.model.recurrent.rows` is the reference. Triton is an optional dependency: import this module lazily.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import triton

from outrider.verify.model.batch import Segment
from outrider.verify.model.gpu import recurrent_kernels, state_kernels
from outrider.verify.model.gpu.device_rows import WORDS, DeviceStates
from outrider.verify.model.recurrent.rows import Recurrence, Scan
from outrider.verify.model.recurrent.states import ROWS
from outrider.verify.model.transfer import on_device

# Columns of a state. With this many, a stream has about one program for each multiprocessor.
BLOCK_VALUES = 32
BLOCK_CHANNELS = 256


@torch.library.custom_op("outrider::recurrent_scan", mutates_args=())  # writes to memory that only addresses name
def scan(
    queries: torch.Tensor,  # float32 [H, N, key_dim]
    keys: torch.Tensor,  # float32 [H, N, key_dim]
    values: torch.Tensor,  # float32 [H, N, value_dim]
    decays: torch.Tensor,  # float32 [H, N, D], with D of 1 or key_dim
    sums: torch.Tensor | None,  # `sum_paths` of decays by channel
    beta: torch.Tensor | None,  # float32 [H, N]
    rows: torch.Tensor,  # see `DeviceStates`
    streams: torch.Tensor,
    layer: int,
) -> torch.Tensor:
    """Reads the streams' states for their rows, [H, N, value_dim]; zero without a stream. Keeps keys, writes and decays."""
    queries, keys, values, decays = map(with_rows, (queries, keys, values, decays))
    heads, count, value_dim = values.shape
    out = torch.empty(count, heads, value_dim, device=values.device)
    named = {"query": queries, "key": keys, "value": values, "decay": decays, "beta": decays if beta is None else beta}
    strides = {f"{name}_{of}": each.stride(at) for name, each in named.items() for at, of in enumerate(("head", "row"))}
    with on_device(values.device):
        recurrent_kernels.scan[count, heads, triton.cdiv(value_dim, BLOCK_VALUES)](
            queries=queries,
            keys=keys,
            values=values,
            decays=decays,
            sums=decays if sums is None else sums,
            beta=named["beta"],
            out=out,
            rows=rows,
            streams=streams,
            layer=layer,
            is_delta=beta is not None,
            size=rows.shape[1],
            **strides,
            **state_sizes(decays.shape[2], keys.shape[2], value_dim),
            num_stages=3 if beta is not None else 2,  # with three, capability 12.0 would spill
        )
    return out.transpose(0, 1)


@scan.register_fake
def _(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *_: Any) -> torch.Tensor:
    return values.new_empty(values.shape[1], values.shape[0], values.shape[2]).transpose(0, 1)


def with_rows(states: torch.Tensor) -> torch.Tensor:
    """States [H, N, C] whose channels follow each other in memory."""
    return states if states.stride(2) == 1 else states.contiguous()


@torch.library.custom_op("outrider::sum_paths", mutates_args=())
def sum_paths(decays: torch.Tensor, rows: torch.Tensor, streams: torch.Tensor) -> torch.Tensor:
    """The sums of decays, float32 [H, N, key_dim], along the path to each row; zero without a stream."""
    decays = with_rows(decays)
    heads, count, key_dim = decays.shape
    out = torch.empty(heads, count, key_dim, device=decays.device)
    with on_device(decays.device):
        recurrent_kernels.sum_paths[count, heads, triton.cdiv(key_dim, BLOCK_CHANNELS)](
            decays=decays,
            decay_head=decays.stride(0),
            decay_row=decays.stride(1),
            out=out,
            rows=rows,
            streams=streams,
            size=rows.shape[1],
            key_dim=key_dim,
            block_keys=BLOCK_CHANNELS,
        )
    return out


@sum_paths.register_fake
def _(decays: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty(decays.shape, device=decays.device)


@torch.library.custom_op("outrider::recurrent_convolution", mutates_args=())
def convolve(
    inputs: torch.Tensor,  # [N, channels]
    weight: torch.Tensor,  # [channels, window + 1]
    bias: torch.Tensor | None,  # [channels]
    rows: torch.Tensor,  # see `DeviceStates`
    streams: torch.Tensor,
    layer: int,
) -> torch.Tensor:
    """The convolution's outputs, float32 [N, channels]; zero without a stream. Keeps the inputs."""
    count, channels = inputs.shape
    out = torch.empty(count, channels, device=inputs.device)
    with on_device(inputs.device):
        state_kernels.convolve[count, triton.cdiv(channels, BLOCK_CHANNELS)](
            inputs=inputs,
            input_row=inputs.stride(0),
            input_channel=inputs.stride(1),
            weight=weight,
            weight_channel=weight.stride(0),
            weight_tap=weight.stride(1),
            bias=weight if bias is None else bias,
            out=out,
            rows=rows,
            streams=streams,
            layer=layer,
            has_bias=bias is not None,
            size=rows.shape[1],
            most_rows=ROWS,
            words=WORDS,
            window=weight.shape[1] - 1,
            channels=channels,
            block=BLOCK_CHANNELS,
        )
    return out


@convolve.register_fake
def _(inputs: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty(inputs.shape, device=inputs.device)


def state_sizes(decay_dim: int, key_dim: int, value_dim: int) -> dict[str, int]:
    """The kernels' sizes of a state and of a stream's rows."""
    sizes = {"decay_dim": decay_dim, "key_dim": key_dim, "value_dim": value_dim}
    return {"most_rows": ROWS, "block_values": BLOCK_VALUES, **sizes}


def enter(states: Sequence[DeviceStates], segments: Sequence[Segment]) -> None:
    """Moves the states of a forward's streams to the ends of their committed texts, and uploads where they are."""
    for each in states:
        if any(each.set(segments)):
            fold(each, len(segments))
    for cache, batch, *_ in segments:
        cache.recurrent.begin(cache.length, len(batch))


def fold(states: DeviceStates, count: int) -> None:
    """Commits the rows of the first `count` streams that are to be folded, in all layers."""
    shape, size = states.shape, states.streams.shape[1]
    with on_device(shape.device):
        if shape.states:
            state_kernels.fold[count, shape.states * shape.heads, triton.cdiv(shape.value_dim, BLOCK_VALUES)](
                streams=states.streams,
                size=size,
                padded_key=triton.next_power_of_2(shape.key_dim),
                **state_sizes(shape.decay_dim, shape.key_dim, shape.value_dim),
            )
        if shape.convolutions:
            state_kernels.shift[count, shape.convolutions, triton.cdiv(shape.channels, BLOCK_CHANNELS)](
                streams=states.streams,
                itemsize=shape.dtype.itemsize,
                size=size,
                most_rows=ROWS,
                window=shape.window,
                channels=shape.channels,
                block=BLOCK_CHANNELS,
            )


class KernelRecurrence(Recurrence):
    """The recurrent layers of one forward by kernels."""

    def __init__(self, states: Sequence[DeviceStates]) -> None:
        """`states` are those of each device."""
        super().__init__([])
        self._states = {each.rows.device: (each.rows, each.streams, each.first) for each in states}

    def convolve(self, number: int, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        *tables, first = self._states[inputs.device]
        return cast(torch.Tensor, convolve(inputs, weight, bias, *tables, number - first))

    def scan(self, number: int, rows: Scan, _: Any) -> torch.Tensor:
        *tables, first = self._states[rows.keys.device]
        queries, keys, values, decays, beta = rows
        sums = sum_paths(decays, *tables) if decays.shape[2] > 1 else None
        return cast(torch.Tensor, scan(queries, keys, values, decays, sums, beta, *tables, number - first))
