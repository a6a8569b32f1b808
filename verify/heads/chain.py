"""Heads that draft one depth each: the first one drafts the token after the text, and the last one all further ones.

Later heads read, for each token, the state that the head before has of the position before, as the authors of DeepSeek-V3 do
(arXiv 2412.19437, section 2.2). So a head's rows begin one position after those of the head before, and each head has a cache.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.verify.heads.model import OWN_POSITIONS, HeadCache, HeadModel, Target, parents
from outrider.verify.heads.networks import Head
from outrider.verify.model.batch import ForwardBatch
from outrider.verify.model.cache.kv_cache import KVCache
from outrider.verify.model.cache.tensor_cache import TensorCache
from outrider.verify.model.transfer import to_device
from outrider.verify.verifier import PREFILL_CHUNK_TOKENS


class ChainCache(HeadCache):
    """The caches of all heads; itself that of the first one."""

    def __init__(self, rows: TensorCache, others: Sequence[TensorCache]) -> None:
        super().__init__(rows)
        self._heads: list[HeadCache] = [self]
        for each in others:
            self._heads.append(HeadCache(each, self._heads[-1]))

    @property
    def heads(self) -> Sequence[HeadCache]:
        return self._heads

    def prepare(self, target: KVCache | None, last: int) -> None:
        for before, later in [*pairwise(self.heads)][::-1]:
            if before.first < later.length <= oldest_state(before):  # the head before computes the state again
                before.cut(later.length - 1)
        super().prepare(target, last)
        for before, later in pairwise(self.heads):
            oldest = min(last, oldest_state(before) + 1)
            if later.length < oldest:
                later.skip(oldest)


class LaterHead(HeadModel):
    """A head that reads the states of the head before."""

    own_positions = OWN_POSITIONS + PREFILL_CHUNK_TOKENS

    def __init__(self, head: Head, target: Target, pack: bool, number: int) -> None:
        """`number` is the largest depth of a row that reads the head before; deeper rows read the head's own states."""
        self._number = number
        super().__init__(head, target, pack)

    def _tap(self, target: Target) -> int:
        return self.head.size

    def _states_before(self, cache: HeadCache, batch: ForwardBatch) -> torch.Tensor:
        before, own = cache.before, cache.rows.hidden
        assert before is not None and own is not None
        states = before.rows.hidden
        assert states is not None
        if not batch.known:
            start = cache.length - before.first - 1
            return states.read(start, start + len(batch))
        above = parents(batch)
        found = states.take(before.rows.length + above)
        if (deep := torch.from_numpy(drafted_depths(cache, batch) > self._number)).any():
            found = torch.where(to_device(deep, found.device)[:, None], own.take(cache.rows.length + above), found)
        return found


class ChainedHeads(HeadModel):
    """Several heads; itself the first one, which reads the target's states."""

    own_positions = OWN_POSITIONS + PREFILL_CHUNK_TOKENS

    def __init__(self, heads: Sequence[Head], target: Target, pack: bool = True) -> None:
        super().__init__(heads[0], target, pack)
        self._later = [LaterHead(each, target, pack, number) for number, each in enumerate(heads[1:], start=1)]
        self.description = repr([self.description, *(each.description for each in self._later)])
        shapes = [self._own_shape, *(each.cache_shape for each in self._later)]
        self.cache_shape = replace(  # of all caches together
            self._own_shape,
            layers=sum((each.layers for each in shapes), ()),
            hidden_positions=sum(each.hidden_positions for each in shapes),
        )

    def start(self, context_tokens: int) -> None:
        super().start(context_tokens)
        for each in self._later:
            each.pages = self.pages
            each.start(context_tokens)

    def new_cache(self) -> ChainCache:
        return ChainCache(self._new_rows(), [each._new_rows() for each in self._later])

    def forward(self, cache: HeadCache, batch: ForwardBatch, logits: bool | None = True) -> torch.Tensor:
        """See `HeadModel.forward`. A row's logits are those of the head that drafts its depth."""
        assert isinstance(cache, ChainCache)
        for each in cache.heads:
            each.rows.reserve(len(batch))
        if batch.known:
            return self._drafted(cache, batch)
        start = cache.length
        found = super().forward(cache, batch, logits)
        for head, own in zip(self._later, cache.heads[1:], strict=True):
            if len(unread := batch.tokens[own.length - start :]):
                head.forward(own, ForwardBatch.chain(unread), None)
        return found

    def _drafted(self, cache: ChainCache, batch: ForwardBatch) -> torch.Tensor:
        """The logits of drafted rows. Heads before those that draft them have no states to read."""
        numbers = np.minimum(drafted_depths(cache, batch), len(self._later))
        found: torch.Tensor | None = None
        for number in range(int(numbers.min()), len(self._later) + 1):
            wanted = numbers == number
            logits = self._later[number - 1].forward(cache.heads[number], batch, True if wanted.any() else None)
            if wanted.any():
                chosen = to_device(torch.from_numpy(wanted), logits.device)[:, None]
                found = logits if found is None else torch.where(chosen, logits, found)
        assert found is not None
        return found


def drafted_depths(cache: HeadCache, batch: ForwardBatch) -> NDArray[np.int64]:
    """The number of tokens, up to that of each row to compute, that the target has not read; [N - known]."""
    return batch.positions(cache.length) - cache.exact + 1


def oldest_state(cache: HeadCache) -> int:
    """The first position whose state the cache has; the next one to read if it has none."""
    assert cache.rows.hidden is not None
    return cache.first + cache.rows.hidden.first
