"""The logits of a step's rows, where they are: an array in host memory, or a tensor on a device.

What decides on the host takes rows as float32 arrays, so it needs no torch. What a device decides is in
`outrider.verify.sampling.device`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

    from outrider.verify.sampling.device import Together

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


def together(parts: Sequence[Any]) -> Together | None:
    """What decides the logits of several streams on a device at once; None on the host. Call its `end` afterwards."""
    if not parts or not is_on_device(parts[0]):
        return None
    from outrider.verify.sampling.device import Together  # imports torch

    return Together(parts)


def is_on_device(logits: Logits) -> bool:
    return not isinstance(logits, np.ndarray) and logits.device.type != "cpu"


def is_on_host(logits: Any) -> bool:
    """Whether these logits, or what processes them when they are read, are arrays in host memory."""
    return bool(getattr(logits, "on_host", isinstance(logits, np.ndarray)))


# The few operations that numpy and torch name differently.


def uploaded(array: NDArray[Any], logits: Any) -> Any:
    """The array where the logits are; on a device, a tensor that is uploaded without waiting."""
    if isinstance(logits, np.ndarray):
        return array
    from outrider.verify.sampling import device  # imports torch

    return device.uploaded(array, logits.device)


def uploaded_masks(allowed: NDArray[np.bool_], logits: Any) -> Any:
    """`uploaded` for masks [M, V]."""
    if isinstance(logits, np.ndarray):
        return allowed
    from outrider.verify.sampling import device  # imports torch

    return device.uploaded_masks(allowed, logits.device)


def float32(logits: Any) -> Any:
    if isinstance(logits, np.ndarray):
        return np.array(logits, np.float32)
    return logits.clone() if logits.itemsize == 4 else logits.float()


def where(condition: Any, this: Any, other: Any) -> Any:
    """`this`, an array or a tensor, where the condition is true, `other` elsewhere."""
    return np.where(condition, this, other) if isinstance(this, np.ndarray) else this.where(condition, other)


def largest(logits: Any) -> Any:
    """The largest logit of each row, [M, 1]."""
    return logits.max(-1, keepdims=True) if isinstance(logits, np.ndarray) else logits.amax(-1, keepdim=True)
