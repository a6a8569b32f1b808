"""A recurrent layer over the rows of a step, as functions of tensors that TorchScript compiles, too.

Each stream brings the tensors of `RecurrentRows.tensors`; a layer writes its rows there and reads what precedes them.
"""

from __future__ import annotations

import torch

from outrider.verify.model.recurrent.convolution import convolve
from outrider.verify.model.recurrent.state import scan

# The number of tensors that a stream brings.
TENSORS = 8


def convolve_step(
    inputs: torch.Tensor,  # [N, channels]
    taps: torch.Tensor,  # [window + 1, channels]; the weights
    bias: torch.Tensor | None,
    layer: int,
    stream: list[torch.Tensor],  # `RecurrentRows.tensors`
) -> torch.Tensor:
    """The convolution's outputs for the rows of one stream, [N, channels]."""
    buffer, index = stream[4][layer], stream[7]
    end = index.size(1) - 1 + stream[5].size(1)
    buffer[end - inputs.size(0) : end] = inputs
    return convolve(buffer[:end], index, taps, bias)


def scan_step(
    queries: torch.Tensor,  # as `outrider.verify.model.recurrent.rows.Scan`
    keys: torch.Tensor,
    values: torch.Tensor,
    decays: torch.Tensor,
    beta: torch.Tensor | None,
    layer: int,
    stream: list[torch.Tensor],  # `RecurrentRows.tensors`
) -> torch.Tensor:
    """What the rows of one stream read of the state, [H, N, value_dim]."""
    ancestors, mask = stream[5], stream[6]
    end = mask.size(1)
    known = end - mask.size(0)
    all_keys, writes, g = stream[1][layer, :, :end], stream[2][layer, :, :end], stream[3][layer, :, :end]
    all_keys[:, known:] = keys
    g[:, known:] = decays
    found, outputs = scan(queries, all_keys, values, beta, writes[:, :known], g, stream[0][layer], ancestors, mask)
    writes[:, known:] = found
    return outputs


def convolve_streams(
    inputs: torch.Tensor,
    taps: torch.Tensor,
    bias: torch.Tensor | None,
    layer: int,
    streams: list[torch.Tensor],  # `size` of each stream; empty ones follow
    size: int,  # TENSORS, which a script cannot see
) -> torch.Tensor:
    """`convolve_step` for the rows of several streams, one stream after the other."""
    if streams[6].size(0) == inputs.size(0):
        return convolve_step(inputs, taps, bias, layer, streams[:size])
    parts: list[torch.Tensor] = []
    start, first = 0, 0
    while start < inputs.size(0):
        stream = streams[first : first + size]
        end = start + stream[6].size(0)
        parts.append(convolve_step(inputs[start:end], taps, bias, layer, stream))
        start, first = end, first + size
    return torch.cat(parts)


def scan_streams(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    decays: torch.Tensor,
    beta: torch.Tensor | None,
    layer: int,
    streams: list[torch.Tensor],
    size: int,
) -> torch.Tensor:
    """`scan_step` for the rows of several streams."""
    if streams[6].size(0) == queries.size(1):
        return scan_step(queries, keys, values, decays, beta, layer, streams[:size])
    parts: list[torch.Tensor] = []
    start, first = 0, 0
    while start < queries.size(1):
        stream = streams[first : first + size]
        end = start + stream[6].size(0)
        own_beta = None if beta is None else beta[:, start:end]
        own = queries[:, start:end], keys[:, start:end], values[:, start:end], decays[:, start:end]
        parts.append(scan_step(own[0], own[1], own[2], own[3], own_beta, layer, stream))
        start, first = end, first + size
    return torch.cat(parts, 1)
