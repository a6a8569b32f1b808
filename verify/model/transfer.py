"""Copies between host and device: uploads do not block, and several tensors are downloaded in one copy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from outrider.verify.model.memory import zeros

if TYPE_CHECKING:
    from outrider.verify.model.cache.kv_cache import HostRows, Part


def on_device(device: torch.device) -> AbstractContextManager[None]:
    """Launches kernels on this device, which may differ from the thread's current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copies a tensor to `device`. Non-blocking pinned upload, stream-ordered."""
    if tensor.device == device:
        return tensor
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)  # from pageable memory, a copy waits for the stream


def to_host(tensor: torch.Tensor, pinned: bool) -> torch.Tensor:
    """Copies a tensor to the host if it is not there.

    A GPU writes to `pinned` memory directly. It is not for what is kept: torch rounds it up to a power of two.
    """
    if tensor.device.type != "cuda" or not pinned:
        return tensor.cpu()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)


def lazy_zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros, which take a CPU's memory when they are written to."""
    if device.type != "cpu" or 0 in size:
        return torch.zeros(size, dtype=dtype, device=device)
    return torch.from_numpy(zeros((math.prod(size) * dtype.itemsize,))).view(dtype).view(size).to(device)


def copy_to_device(tensor: torch.Tensor, target: torch.Tensor) -> None:
    """Copies a tensor of the host into memory of a device, as `to_device`, without another tensor there in between."""
    is_upload = target.device.type == "cuda" and tensor.device.type == "cpu"
    target.copy_(tensor.pin_memory() if is_upload else tensor, non_blocking=is_upload)


def bytes_of(tensor: torch.Tensor) -> HostRows:
    """A copy of a tensor [..., N] on the host, as bytes, uint8 [..., N times the size of an element]."""
    return tensor.to("cpu", copy=True, memory_format=torch.contiguous_format).view(torch.uint8).numpy()


def tensor_of(part: Part, dtype: torch.dtype) -> torch.Tensor:
    """The rows of a page as a tensor of the stored data type, wherever they are."""
    if not isinstance(part, np.ndarray):
        return part
    if not part.size:  # `view` refuses the strides of such arrays
        return torch.empty(*part.shape[:-1], part.shape[-1] // dtype.itemsize, dtype=dtype)
    return torch.from_numpy(part).view(dtype)


class Download:
    """Tensors of 32-bit numbers, [M] or [M, C] with the same M, on their way to the host in one copy.

    On a GPU, the copy is queued behind what has been launched so far, and waits for nothing that is launched later.
    """

    def __init__(self, *tensors: torch.Tensor, shared: Copy | None = None) -> None:
        """With `shared`, the tensors are part of that copy, of the same device, and there once it was started."""
        self._tensors = tensors
        self._copy: Copy | None = None  # None without a device
        device = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), None)
        if device is None:
            return
        self._copy = shared or Copy()
        numbers = [tensor.reshape(-1).view(torch.int32) for tensor in tensors]
        self._place = self._copy.add([to_device(each, device) for each in numbers if each.numel()])
        if shared is None:
            self._copy.start()

    def arrays(self) -> list[Any]:
        """The tensors as numpy arrays, once they are there."""
        if self._copy is None:
            return [tensor.numpy() for tensor in self._tensors]
        sizes = [tensor.numel() for tensor in self._tensors]
        numbers = self._copy.numbers()[self._place :][: sum(sizes)].split(sizes)
        return [part.view(each.dtype).view(each.shape).numpy() for part, each in zip(numbers, self._tensors, strict=True)]


class Copy:
    """A copy of int32 tensors, [N], from a device."""

    def __init__(self) -> None:
        self._parts: list[torch.Tensor] = []
        self._length = 0
        self._is_there = False

    def add(self, parts: Sequence[torch.Tensor]) -> int:
        """Adds tensors; returns where the first one begins in `numbers`."""
        place = self._length
        self._parts += parts
        self._length += sum(map(len, parts))
        return place

    def start(self) -> None:
        if not self._parts:
            return
        device = self._parts[0].device
        joined = self._parts[0] if len(self._parts) == 1 else torch.cat([to_device(part, device) for part in self._parts])
        self._parts = []
        self._numbers = torch.empty(joined.shape, dtype=torch.int32, pin_memory=True).copy_(joined, non_blocking=True)
        self._done = torch.cuda.Event()
        self._done.record(torch.cuda.current_stream(device))

    def numbers(self) -> torch.Tensor:
        """All tensors, one after the other, once they are on the host."""
        if not self._is_there:
            self._done.synchronize()
            self._is_there = True
        return self._numbers
