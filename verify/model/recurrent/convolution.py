"""Short causal convolutions over a draft tree: each row gathers its last ancestors, or the committed window before them."""

from __future__ import annotations

import torch


def gather_index(ancestors: torch.Tensor, first: int, window: int) -> torch.Tensor:
    """Indices of the inputs of rows from `first` on, in the window followed by all rows, int64 [N, window + 1].

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
    taps: torch.Tensor,  # [window + 1, channels], contiguous; the weights
    bias: torch.Tensor | None,  # [channels]
) -> torch.Tensor:
    """The convolution's outputs, [N, channels], with the dtype of the weights."""
    inputs = inputs.to(taps.dtype)
    if inputs.size(0) > taps.size(0):  # a row alone reads all of them
        inputs = inputs.index_select(0, index.flatten())
    gathered = inputs.view(index.size(0), taps.size(0), taps.size(1))
    out = gathered[:, 0] * taps[0]
    for place in range(1, taps.size(0)):
        out.addcmul_(gathered[:, place], taps[place])
    return out if bias is None else out.add_(bias)
