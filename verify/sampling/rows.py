"""The logits of a step's rows, where they are: an array in host memory, or a tensor on a device.

What decides on the host takes rows as float32 arrays, so it needs no torch. What a device decides is in
`outrider.verify.sampling.device`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

Logits: TypeAlias = "NDArray[np.float32] | torch.Tensor"  # [M, V], or [V] of one row


def in_place(logits: Logits) -> Logits:
    """Logits [M, V] as they are decided: those in host memory as a float32 array, those on a device as they are."""
    if isinstance(logits, np.ndarray) or is_on_device(logits):
        return logits
    found: NDArray[np.float32] = logits.float().numpy()
    return found


def copies(parts: Sequence[Any]) -> Sequence[Logits]:
    """Copies of the logits of several streams, which the next forward does not overwrite."""
    if not parts or not is_on_device(parts[0]):
        return [np.array(in_place(part)) for part in parts]
    from outrider.verify.sampling import device  # imports torch

    return device.copies(parts)


def decided_together(parts: Sequence[Any]) -> AbstractContextManager[object]:
    """Inside, this thread ranks the logits of several streams at once, and downloads what is decided in one copy."""
    if not parts or not is_on_device(parts[0]):
        return nullcontext()
    from outrider.verify.sampling import device  # imports torch

    return device.decided_together(parts)


def is_on_device(logits: Logits) -> bool:
    """Whether the logits are on another device than the host."""
    return not isinstance(logits, np.ndarray) and logits.device.type != "cpu"


def is_on_host(logits: Any) -> bool:
    """Whether these logits, or what processes them when they are read, are arrays in host memory."""
    return bool(getattr(logits, "on_host", isinstance(logits, np.ndarray)))


class Arrays(Protocol):
    """The few operations on logits that numpy and torch name differently. The others are the same in both."""

    def of(self, array: NDArray[Any]) -> Any:
        """An array where the logits are; on a GPU, uploaded without waiting."""

    def masks(self, allowed: NDArray[np.bool_]) -> Any:
        """`of`, for masks [M, V]."""

    def float32(self, logits: Any) -> Any:
        """A copy in float32."""

    def where(self, condition: Any, this: Any, other: Any) -> Any:
        """`this` where the condition is true, `other` elsewhere."""

    def largest(self, logits: Any) -> Any:
        """The largest logit of each row, [M, 1]."""


class HostArrays:
    """Arrays of numpy. Implements `Arrays`."""

    def of(self, array: NDArray[Any]) -> NDArray[Any]:
        """The array."""
        return array

    masks = of

    def float32(self, logits: NDArray[Any]) -> NDArray[np.float32]:
        """See `Arrays`."""
        return np.array(logits, np.float32)

    def where(self, condition: Any, this: Any, other: Any) -> Any:
        """See `Arrays`."""
        return np.where(condition, this, other)

    def largest(self, logits: NDArray[Any]) -> NDArray[Any]:
        """See `Arrays`."""
        found: NDArray[Any] = logits.max(-1, keepdims=True)
        return found


HOST_ARRAYS = HostArrays()


def arrays_of(logits: Logits) -> Arrays:
    """The operations on these logits."""
    if isinstance(logits, np.ndarray):
        return HOST_ARRAYS
    from outrider.verify.sampling.device import DeviceArrays  # imports torch

    return DeviceArrays(logits.device)
