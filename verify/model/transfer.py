"""Between host and device: what goes to a GPU does not wait for its queue, and what comes back comes in one copy."""

from __future__ import annotations

from typing import Any

import torch


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor there; good to read after what the device has queued, so also behind a forward that still runs."""
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)  # from pageable memory, a copy waits for the queue


def to_host(*tensors: torch.Tensor) -> list[Any]:
    """Tensors of M rows of 32-bit numbers ([M] or [M, C]) as arrays; those on a GPU cross in one copy."""
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return [tensor.numpy() for tensor in tensors]
    parts = [tensor.view(torch.int32).reshape(len(tensor), tensor.numel() // len(tensor)) for tensor in tensors]
    device = next(part.device for part in parts if part.device.type != "cpu")
    whole = torch.cat([to_device(part, device) for part in parts], 1).cpu()
    split = whole.split([part.shape[1] for part in parts], 1)
    back = (part.contiguous().view(tensor.dtype).view(tensor.shape) for part, tensor in zip(split, tensors, strict=True))
    return [tensor.numpy() for tensor in back]
