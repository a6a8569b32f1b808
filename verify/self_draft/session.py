"""Drafts of the target without some of its layers, from the target's own cache: no prompt is read, and no row is kept.

The rows of a draft are written where the target then writes those that it verifies, so a draft ends with the target's next
forward. `pearl` drafts while the target runs; there, the rows lie behind those of the target, and are computed again after
its step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import TypeVar, cast

import numpy as np
import torch

from outrider.drafters.interface import MAX_NODES, Ints, Sampling
from outrider.drafters.model.language_model import Candidates
from outrider.drafters.sequence import Sequence
from outrider.verify.draft_model.runner import DraftRunner
from outrider.verify.draft_model.session import SessionDraft
from outrider.verify.model.batch import ForwardBatch
from outrider.verify.model.cache.kv_cache import KVCache
from outrider.verify.model.runner import ModelRunner

T = TypeVar("T")
GAP = MAX_NODES + 1  # rows that the target may write while the draft model's thread drafts


class SelfRunner(DraftRunner):
    """The target without some layers as a draft model that sessions share. Sessions have no caches of their own."""

    def __init__(self, runner: ModelRunner, slots: int = 4, threads: int = 1) -> None:
        """`runner` is from `LayerSkipper` and started; at most `slots` sessions draft together."""
        super().__init__(runner, runner.vocabulary, slots, threads)
        self.drafts = True  # False = no draft is expected to pay

    def session(self) -> SelfDraft:
        """The draft model for a new session."""
        return SelfDraft(self)

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """As `DraftRunner.submit`. On a GPU, where the target and its drafts share pages and a device, runs `work` at once."""
        if not self.runner.in_pages:
            return super().submit(work)
        done = Future[T]()
        try:
            done.set_result(work())
        except Exception as error:
            done.set_exception(error)
        return done

    def fork(self, source: SessionDraft, forked: SessionDraft, length: int) -> None:
        """Nothing: a fork reads the rows of its own target."""


class SelfDraft(SessionDraft):
    """One session's drafts. Implements `outrider.drafters.model.language_model.LanguageModel`."""

    _shared: SelfRunner
    _computed = 0  # rows that are in the cache, the first ones
    _gap = 0  # rows of the cache between the text and the first row
    _cache: KVCache | None = None

    def begin(self, text: Sequence, sampling: Sampling | None = None) -> None:
        self._start(text, sampling)
        self._computed = 0

    @property
    def space(self) -> int:
        return super().space if self._shared.drafts and self._text.cache is not None else 0

    def root(self, count: int) -> Candidates:
        self._rows, self._depths = [int(self._text.tokens[self._length - 1])], [0]
        self._ancestors = np.ones((1, 1), np.bool_)
        self._computed = 0
        return self._forward(1, count)

    def expand(self, tokens: Collection[int], parents: Collection[int], count: int) -> Candidates:
        self._add_rows(tokens, parents)
        return self._forward(len(tokens), count)

    def retract(self, rows: int) -> None:
        super().retract(rows)
        self._computed = min(self._computed, rows)

    def advance(self, tokens: Ints) -> None:
        path = self._follow(tokens.tolist())
        self._length += len(tokens)
        self._computed = 0  # the target has overwritten them, or has now better ones for some
        if len(path) > len(tokens):
            self._move_root(path)
        else:
            self._drop_rows()

    def _forward(self, new: int, count: int) -> Candidates:
        """Computes the rows that are not in the cache; candidates for the last `new` rows."""
        gap = GAP if self._shared.is_own_thread else 0
        if gap != self._gap:
            self._computed = 0  # they are elsewhere: drafted before the target's forward, and continued during it
        if not self._computed:
            self._find_cache(gap)
        assert self._cache is not None
        known = self._gap + self._computed
        size = self._gap + len(self._rows)
        ancestors = np.eye(size, dtype=np.bool_)
        ancestors[self._gap :, self._gap :] = self._ancestors
        tokens, depths = ([0] * self._gap + each for each in (self._rows, self._depths))
        batch = ForwardBatch(torch.tensor(tokens), torch.tensor(depths), torch.from_numpy(ancestors), known)
        logits = self._shared.forward(self._cache, batch)[-new:]
        self._computed = len(self._rows)
        return self._candidates(logits, self._depths[-new:], count)

    def _find_cache(self, gap: int) -> None:
        """Sets where rows are computed. In the draft model's thread, the target may commit rows meanwhile."""
        cache, self._gap = cast(KVCache, self._text.cache), gap
        if gap:
            cache = copy.copy(cache)
            cache.length = self._length - 1
        self._cache = cache
