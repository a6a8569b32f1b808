"""Launches the kernels of recurrent layers as operations, which torch.compile and CUDA graphs take as they are.

`outrider.verify.model.recurrent.rows` is the reference. Triton is an optional dependency: import this module lazily.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import triton

from outrider.verify.model.batch import Segment
from outrider.verify.model.gpu import recurrent_kernels as kernels
from outrider.verify.model.gpu.device_rows import WORDS, DeviceStates
from outrider.verify.model.recurrent.rows import Recurrence, Scan
from outrider.verify.model.recurrent.states import ROWS
from outrider.verify.model.transfer import on_device

# The tile size of a matrix product.
BLOCK_ROWS = 16
BLOCK_KEYS = 32
# Columns of a state. With this many, a stream has about one program for each multiprocessor.
BLOCK_VALUES = 32
BLOCK_CHANNELS = 256


@torch.library.custom_op("outrider::recurrent_scan", mutates_args=())  # writes to memory that only addresses name
def scan(
    queries: torch.Tensor,  # float32 [H, N, key_dim]
    keys: torch.Tensor,  # float32 [H, N, key_dim]
    values: torch.Tensor,  # float32 [H, N, value_dim]
    decays: torch.Tensor,  # float32 [H, N]
    beta: torch.Tensor | None,  # float32 [H, N]
    rows: torch.Tensor,  # see `DeviceStates`
    streams: torch.Tensor,
    layer: int,
) -> torch.Tensor:
    """Reads the streams' states for their rows, [H, N, value_dim]; zero without a stream. Keeps keys, writes and decays."""
    queries, keys, values = (each if each.stride(2) == 1 else each.contiguous() for each in (queries, keys, values))
    heads, count, value_dim = values.shape
    out = torch.empty(count, heads, value_dim, device=values.device)
    named = {"query": queries, "key": keys, "value": values, "decay": decays, "beta": decays if beta is None else beta}
    strides = {f"{name}_{of}": each.stride(at) for name, each in named.items() for at, of in enumerate(("head", "row"))}
    with on_device(values.device):
        kernels.scan[count, heads, triton.cdiv(value_dim, BLOCK_VALUES)](
            queries=queries,
            keys=keys,
            values=values,
            decays=decays,
            beta=named["beta"],
            out=out,
            rows=rows,
            streams=streams,
            layer=layer,
            is_delta=beta is not None,
            size=rows.shape[1],
            padded_rows=triton.next_power_of_2(min(ROWS, count)),
            block_keys=BLOCK_KEYS,
            block_rows=BLOCK_ROWS,
            **strides,
            **state_sizes(keys.shape[2], value_dim),
        )
    return out.transpose(0, 1)


@scan.register_fake
def _(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *_: Any) -> torch.Tensor:
    return values.new_empty(values.shape[1], values.shape[0], values.shape[2]).transpose(0, 1)


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
        kernels.convolve[count, triton.cdiv(channels, BLOCK_CHANNELS)](
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


def state_sizes(key_dim: int, value_dim: int) -> dict[str, int]:
    """The kernels' sizes of a state and of a stream's rows."""
    return {"most_rows": ROWS, "key_dim": key_dim, "value_dim": value_dim, "block_values": BLOCK_VALUES}


def enter(states: DeviceStates, segments: Sequence[Segment]) -> None:
    """Moves the states of a forward's streams to the ends of their committed texts, and uploads where they are."""
    pending = states.set(segments)
    if any(pending):
        fold(states, len(segments))
    for cache, batch, *_ in segments:
        cache.recurrent.begin(cache.length, len(batch))


def fold(states: DeviceStates, count: int) -> None:
    """Commits the rows of the first `count` streams that are to be folded, in all layers."""
    shape, size = states.shape, states.streams.shape[1]
    with on_device(shape.device):
        if shape.states:
            kernels.fold[count, shape.states * shape.heads, triton.cdiv(shape.value_dim, BLOCK_VALUES)](
                streams=states.streams,
                size=size,
                padded_key=triton.next_power_of_2(shape.key_dim),
                **state_sizes(shape.key_dim, shape.value_dim),
            )
        if shape.convolutions:
            kernels.shift[count, shape.convolutions, triton.cdiv(shape.channels, BLOCK_CHANNELS)](
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

    def __init__(self, states: DeviceStates) -> None:
        super().__init__([])
        self._tables = {"rows": states.rows, "streams": states.streams}

    def convolve(self, number: int, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return cast(torch.Tensor, convolve(inputs, weight, bias, **self._tables, layer=number))

    def scan(self, number: int, rows: Scan, _: Any) -> torch.Tensor:
        queries, keys, values, decays, beta = rows
        return cast(torch.Tensor, scan(queries, keys, values, decays[..., 0], beta, **self._tables, layer=number))
