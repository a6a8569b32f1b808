"""The inputs of a forward in device memory, where a kernel or a captured graph reads them."""

from __future__ import annotations

import torch

from verify.model.batch import ForwardBatch
from verify.model.cache import CacheShape, KVCache
from verify.model.transfer import to_device

ALIGNMENT = 16  # elements that slots are aligned to; lets the compiler vectorise loads


class DeviceRows:
    """A forward's inputs in device memory: slot, text length, tokens, depths and ancestor bits."""

    def __init__(self, shape: CacheShape, max_rows: int) -> None:
        """For up to `max_rows` rows over slots of `shape`."""
        self.shape = shape
        self.anchor = torch.empty(ALIGNMENT, dtype=shape.dtype, device=shape.device)
        self._packed = torch.zeros(2 + 3 * max_rows, dtype=torch.int64, device=shape.device)
        self.location = self._packed[:2]  # text length, and offset of the slot from the anchor in elements
        self.tokens, self.depths, self.bits = self._packed[2:].view(3, max_rows)

    def set(self, cache: KVCache, batch: ForwardBatch) -> None:
        """Uploads a forward's inputs in one copy. Padding rows attend to the prefix and root; nothing attends to them."""
        offset_bytes = cache.tensor.data_ptr() - self.anchor.data_ptr()
        packed = torch.zeros(len(self._packed), dtype=torch.int64)
        packed[0] = cache.length
        packed[1] = offset_bytes // self.shape.dtype.itemsize
        rows = packed[2:].view(3, -1)[:, : len(batch)]
        rows[0] = batch.tokens
        rows[1] = batch.depths
        if len(batch) > 1:
            rows[2] = ancestor_bits(batch.ancestor_mask())
        self._packed.copy_(to_device(packed, self.shape.device))


def ancestor_bits(ancestors: torch.Tensor) -> torch.Tensor:
    """bool [N, N] to int64 [N], on the host: bit j says that the row attends to row j + 1; all attend to row 0. N <= 65."""
    powers = torch.ones(1, dtype=torch.int64) << torch.arange(len(ancestors) - 1)
    return (ancestors[:, 1:] * powers).sum(1)
