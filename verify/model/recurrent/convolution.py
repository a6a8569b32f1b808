"""Short causal convolutions over a draft tree: each row gathers its last ancestors, or the committed window before them."""

from __future__ import annotations

import torch
from transformers.activations import ACT2FN


def gather_index(ancestors: torch.Tensor, first: int, window: int) -> torch.Tensor:
    """Where the rows from `first` on find their inputs in the window followed by all rows, int64 [N, window + 1].

    `ancestors` is bool [L, L] with parents before children; the inputs are in the order of the text, the row's own last.
    """
    own = ancestors[first:]
    order = torch.arange(ancestors.shape[1], device=own.device)
    steps = torch.arange(window + 1, device=own.device)  # back from the row
    ranked = torch.where(own, order, -1).sort(-1, descending=True).values
    found = torch.nn.functional.pad(ranked, (0, max(0, window + 1 - ranked.shape[1])), value=-1)[:, : window + 1]
    depth = own.sum(-1, keepdim=True)
    return torch.where(found >= 0, found + window, window + depth - 1 - steps).flip(-1)


def convolve(
    inputs: torch.Tensor,  # [window + L, channels]
    index: torch.Tensor,  # `gather_index`
    weight: torch.Tensor,  # [channels, window + 1]
    bias: torch.Tensor | None,  # [channels]
    activation: str | None,
) -> torch.Tensor:
    """The convolution's outputs, [N, channels], with the dtype of the inputs."""
    gathered = inputs[index].to(weight.dtype)  # [N, window + 1, channels]
    out = (gathered * weight.t()).sum(1)
    if bias is not None:
        out = out + bias
    if activation is not None:
        out = ACT2FN[activation](out)
    return out.to(inputs.dtype)
