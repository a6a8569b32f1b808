"""A slot's cache in host memory as PyTorch reads and writes it."""

from collections.abc import Iterable

import torch

from outrider.verify.model.cache.codec import encode, noise_like
from outrider.verify.model.cache.host_cache import HostCache
from outrider.verify.model.cache.shape import CacheShape
from outrider.verify.model.recurrent.rows import TensorStates
from outrider.verify.model.transfer import tensor_of


class TensorCache(HostCache):
    """A `HostCache` with its keys and values as tensors."""

    def __init__(self, shape: CacheShape, positions: int) -> None:
        super().__init__(shape, positions, new_states(shape))
        self._tensors = [tensor_of(planes, self.stored_dtype) for planes in self._planes]
        self._rows = [tuple(tensor_of(each, self.stored_dtype) for each in layer) for layer in self.layers]

    @property
    def tensor(self) -> torch.Tensor:
        """Keys and values of a uniform layout as stored, [layers, 2, kv_heads, positions, stored width]."""
        assert self._is_uniform
        planes = self._tensors[0]
        return planes.view(len(planes) // 2, 2, *planes.shape[1:])

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor, known: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes [heads, N, width] from `length + known` to `end`; returns the rows so far, [heads, end, stored width].

        `outrider.verify.model.cache.codec.decode` gives the values of these; they are the rows themselves in a cache of their
        data type."""
        start = self.length + known
        end = start + key.shape[1]
        keys, values = self._rows[layer]
        keys[:, start:end] = encode(key, keys.dtype)
        values[:, start:end] = encode(value, values.dtype)
        return keys[:, :end], values[:, :end]

    def fill(self, length: int, noise: torch.Generator | None = None) -> None:
        """`HostCache.fill`, or fills with rows of noise."""
        super().fill(length)
        if noise is not None:
            for part in self._contents(length):
                part.copy_(noise_like(part, noise))

    def _contents(self, length: int) -> Iterable[torch.Tensor]:
        return [planes[:, :, :length] for planes in self._tensors]


def new_states(shape: CacheShape) -> TensorStates | None:
    """A slot's states before its first token; None for a model without recurrent layers."""
    return None if shape.recurrent is None else TensorStates(shape.recurrent)
