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


def copy_to_device(tensor: torch.Tensor, target: torch.Tensor) -> None:
    """Copies a tensor of the host into memory of a device, as `to_device`, without another tensor there in between."""
    is_upload = target.device.type == "cuda" and tensor.device.type == "cpu"
    target.copy_(tensor.pin_memory() if is_upload else tensor, non_blocking=is_upload)


class Download:
    """Tensors of 32-bit numbers, [M] or [M, C] with the same M, on their way to the host in one copy.

    On a GPU, the copy is queued behind what has been launched so far, and waits for nothing that is launched later.
    """

    def __init__(self, *tensors: torch.Tensor) -> None:
        self._tensors = tensors
        self._joined: torch.Tensor | None = None  # int32 [M, C] on the host; None without a copy
        devices = [tensor.device for tensor in tensors if tensor.device.type != "cpu"]
        if not devices:
            return
        numbers = [tensor.view(torch.int32).reshape(len(tensor), -1) for tensor in tensors if tensor.numel()]
        joined = torch.cat([to_device(each, devices[0]) for each in numbers], 1)
        self._joined = torch.empty(joined.shape, dtype=torch.int32, pin_memory=True).copy_(joined, non_blocking=True)
        self._done = torch.cuda.Event()
        self._done.record(torch.cuda.current_stream(devices[0]))

    def arrays(self) -> list[Any]:
        """The tensors as numpy arrays, once they are there."""
        if self._joined is None:
            return [tensor.numpy() for tensor in self._tensors]
        self._done.synchronize()
        split = self._joined.split([tensor.numel() // len(tensor) for tensor in self._tensors], 1)
        return [
            part.contiguous().view(tensor.dtype).view(tensor.shape).numpy()
            for part, tensor in zip(split, self._tensors, strict=True)
        ]
