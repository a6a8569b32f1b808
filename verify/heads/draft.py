"""Draft heads as draft models of sessions: committed tokens are read with the target's states as soon as these exist."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from outrider.drafters.model.language_model import Candidates
from outrider.verify.draft_model.runner import DraftRunner
from outrider.verify.draft_model.session import SessionDraft
from outrider.verify.heads.model import HeadCache, HeadModel
from outrider.verify.model.runner import ModelRunner
from outrider.verify.verifier import CachedText


class HeadRunner(DraftRunner):
    """A draft head shared by sessions."""

    def __init__(self, head: HeadModel, slots: int = 4, threads: int = 1) -> None:
        super().__init__(cast(ModelRunner, head), head.vocabulary, slots, threads)

    def run_drafts(self, work: Sequence[Callable[[], None]]) -> None:
        """Runs work of several sessions, one after the other: a head computes one session's rows at a time."""
        for each in work:
            each()

    def session(self) -> SessionDraft:
        """The head for a new session."""
        return HeadDraft(self)


class HeadDraft(SessionDraft):
    """One session's draft head. Implements `outrider.drafters.model.language_model.LanguageModel`."""

    _shared: HeadRunner

    @property
    def unread(self) -> int:
        return 1  # it reads states that the target has computed, with the next draft

    def read(self, tokens: int) -> int:
        return 0

    def root(self, count: int) -> Candidates:
        cache = cast(HeadCache, self._shared.cache_for(self))
        target = self._text.cache if isinstance(self._text, CachedText) else None
        source = cache.source = None if target is None else target.hidden
        cache.truncate(cache.exact)  # the target has now computed the states of rows that read the head's own
        oldest = self._length - 1  # the last token is always read
        if source is not None and source.end >= oldest:
            oldest = min(oldest, source.first + 1)
        if cache.length < oldest:
            cache.skip(oldest)
        if cache.length < self._text.prompt_length - 1:
            self._shared.synchronize()  # unlike a step, reading a prompt does not wait for the device
        found = super().root(count)
        cache.exact = cache.length + 1  # includes row 0
        return found
