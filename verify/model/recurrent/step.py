"""A recurrent layer over the rows of a step, as functions of tensors.

Each stream brings the tensors of `RecurrentRows.tensors`; a layer writes its rows there and reads what precedes them.
"""

from __future__ import annotations

import torch

from outrider.verify.model.recurrent.convolution import convolve
from outrider.verify.model.recurrent.state import scan


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
    """Reads the state for the rows of one stream, [H, N, value_dim]."""
    ancestors, mask = stream[5], stream[6]
    end = mask.size(1)
    known = end - mask.size(0)
    all_keys, writes, g = stream[1][layer, :, :end], stream[2][layer, :, :end], stream[3][layer, :, :end]
    all_keys[:, known:] = keys
    g[:, known:] = decays
    found, outputs = scan(queries, all_keys, values, beta, writes[:, :known], g, stream[0][layer], ancestors, mask)
    writes[:, known:] = found
    return outputs
