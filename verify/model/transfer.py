"""Copies between host and device: uploads do not block, and several tensors are downloaded in one copy."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def on_device(device: torch.device) -> AbstractContextManager[None]:
    """Launches kernels on this device, which may differ from the thread's current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copies a tensor to `device`. Non-blocking pinned upload, stream-ordered."""
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)  # from pageable memory, a copy waits for the stream


def to_host(*tensors: torch.Tensor) -> list[Any]:
    """Tensors of 32-bit numbers, [M] or [M, C] with the same M, as numpy arrays. Copied to the host together."""
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return [tensor.numpy() for tensor in tensors]
    parts = [tensor.view(torch.int32).reshape(len(tensor), tensor.numel() // len(tensor)) for tensor in tensors]
    device = next(part.device for part in parts if part.device.type != "cpu")
    joined = torch.cat([to_device(part, device) for part in parts], 1).cpu()
    split = joined.split([part.shape[1] for part in parts], 1)
    return [
        part.contiguous().view(tensor.dtype).view(tensor.shape).numpy() for part, tensor in zip(split, tensors, strict=True)
    ]
