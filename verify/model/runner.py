"""The interface of model runners: a loaded model, caches for its sessions, and forwards over them."""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from outrider.drafters.interface import MAX_NODES
from outrider.verify.findings import processor
from outrider.verify.model.batch import ForwardBatch, Segment
from outrider.verify.model.cache.kv_cache import KVCache
from outrider.verify.model.cache.shape import CacheShape

if TYPE_CHECKING:
    from outrider.verify.model.pictures import PictureReader


class ModelRunner(ABC):
    """A loaded model and the shape of its cache. Forwards, one at a time, keep no state outside the cache passed to them."""

    device: Any  # of the logits, a `Device`
    cache_shape: CacheShape
    vocabulary: int
    description: str  # of the model: what it computes depends on it
    library: str  # that computes it, with its version
    kernels: str  # that compute the model, for people
    stop_tokens: frozenset[int]  # that end an answer
    weight_bytes: int  # read by each step
    held_bytes: int  # of all weights
    maps_weights = False  # whether they are a mapped file, whose memory the system may take back
    weight_bits: float  # mean, scales included
    model_tokens: int  # the longest context that the model supports
    context_tokens: int
    invariance = "off"  # says whether rows are invariant, and why, for people
    is_invariant = False  # whether a row has the same bits in every step
    threads: int | None = None  # of a library of its own; None = torch's
    max_rows: int  # the most rows that are computed at once if they belong to several streams
    pages: int | None = None  # of the pool that caches share, from the memory plan; None = some contexts
    can_assume = True  # whether caches have rows to `assume` that were never computed
    most_caches = sys.maxsize  # that are of use
    is_steady = False  # whether a further row of a step costs as much as any other, so that a few steps tell the cost of all
    experts: tuple[int, int] | None = None  # of each mixture, and those of a row; None = no mixtures, or nobody counts
    touched = 0.0  # experts that the latest forward used, mean over the mixtures; once its results are known
    pictures: PictureReader | None = None  # places pictures in texts; None = the model reads text only
    in_pages = False  # whether caches are pages of a pool that they share

    @abstractmethod
    def start(self, context_tokens: int) -> None:
        """Sets the context length, at most the model's, and takes memory. Raises ModelError."""

    @abstractmethod
    def new_cache(self) -> KVCache:
        """An empty cache for a full context."""

    @abstractmethod
    def forward_all(self, segments: Sequence[Segment]) -> list[Any]:
        """`forward` for each segment, as many at once as possible. No two segments have the same cache.

        Raises OutOfPages before anything is computed or written if the caches' pool has no room for all rows.
        """

    def forward(self, cache: KVCache, batch: ForwardBatch, logits: bool = True) -> Any:
        """Runs the batch after the cache's committed tokens and writes the rows' keys and values; commits nothing.

        Returns logits [N - known, V] on the model's device, valid until the next forward; without `logits`, the last row's.
        """
        return self.forward_all([Segment(cache, batch, logits)])[0]

    @property
    def backends(self) -> str:
        """Names the kernels on which measurements depend, beside the machine and the model."""
        return f"{self.kernels}, {self.weight_bytes} bytes"

    @property
    def machine(self) -> tuple[str, ...]:
        """The device that computes, and the number of its threads."""
        return processor(), str(self.threads or os.cpu_count())

    def use_threads(self, count: int) -> None:
        """Computes with this number of CPU threads from the next `start` on.

        PyTorch's threads, if it is loaded for a draft model, would wait for work on the same cores.
        """
        self.threads = count
        if torch := sys.modules.get("torch"):
            torch.set_num_threads(1)

    @property
    def alone(self) -> str:
        """The rows of steps that one thread computes, because more have not gained, for people."""
        return ""

    @property
    def dtypes(self) -> tuple[str, str]:
        """The data types of activations, and of keys and values, for people."""
        shape = self.cache_shape
        return str(shape.dtype).removeprefix("torch."), str(shape.stored_dtype).removeprefix("torch.")

    @property
    def free_pages(self) -> int | None:
        """Pages of the pool that no cache holds; None without a pool."""
        return None

    def draft_depth(self, length: int) -> int:
        """The depth of the deepest node that a draft may have, after `length` tokens in the cache."""
        return MAX_NODES

    @property
    def draft_nodes(self) -> int:
        """The most nodes that a draft may have."""
        return MAX_NODES
