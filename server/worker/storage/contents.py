"""The contents of a session that is saved: copies of what is small, and its rows, which are copied one page at a time.

Promises that `stop` returns when no rows are read any more, after one page at most.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from outrider.drafters.interface import Ints
from outrider.drafters.options import DrafterName
from outrider.server.worker.storage.session_format import (
    LEARNED,
    ROWS,
    TEXT,
    arrays_digest,
    rows_digest,
    state_digest,
    state_tensors,
    text_digest,
)
from outrider.verify.model.cache import kv_cache
from outrider.verify.model.cache.kv_cache import HostRows, Page, Rows
from outrider.verify.verifier import Verifier

if TYPE_CHECKING:
    from outrider.verify.model.recurrent.states import Snapshot

# The states of recurrent layers are saved at a session's end, and once before it.
SAVED_STATES = 2


class Stopped(Exception):
    """A session's rows may not be read any more."""


@dataclass
class Contents:
    """One idle session. Its rows are read by one thread until another one stops it."""

    principal: str
    name: str | None
    prompt_tokens: int
    text: Ints  # int32 [N]
    pages: Sequence[Page]  # whole pages
    rows: Rows
    length: int  # number of rows
    states: Sequence[Snapshot]
    learned: Mapping[str, Mapping[str, NDArray[Any]]]
    is_read: bool = False  # whether the rows are no longer needed
    _stopped: bool = False
    _reading: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def of(
        cls, principal: str, name: str | None, verifier: Verifier, learned: Mapping[DrafterName, Mapping[str, NDArray[Any]]]
    ) -> Contents:
        rows, length = verifier.rows, verifier.committed_rows
        return cls(
            principal,
            name,
            verifier.sequence.prompt_length,
            np.array(verifier.sequence.tokens, np.int32),
            rows.share(length // kv_cache.PAGE_TOKENS),
            rows,
            length,
            [each.on_host(pinned=True) for each in rows.states(length)[-SAVED_STATES:]],
            {drafter: {key: array.copy() for key, array in arrays.items()} for drafter, arrays in learned.items()},
        )

    def page(self, index: int) -> HostRows:
        """A copy of the rows of a page. Raises Stopped."""
        with self._reading:
            if self._stopped:
                raise Stopped
            start = index * kv_cache.PAGE_TOKENS
            part = next(iter(self.rows.parts(min(start + kv_cache.PAGE_TOKENS, self.length), start)))
            return kv_cache.on_host(part)

    def rest(self) -> HostRows | None:
        """A copy of the rows after the last whole page; None if there are none. Reads the last rows. Raises Stopped."""
        rest = self.page(len(self.pages)) if self.length % kv_cache.PAGE_TOKENS else None
        self.is_read = True
        return rest

    def stop(self) -> bool:
        """Returns when the rows are not read any more: whether all that are needed have been."""
        with self._reading:
            self._stopped = True
        return self.is_read

    def labels(self, rest: HostRows | None) -> dict[str, str]:
        """The labels of the session's file, once all pages have digests."""
        labels = {"principal": self.principal, "prompt_tokens": str(self.prompt_tokens), "text": text_digest(self.text)}
        labels |= {"length": str(self.length), "states": " ".join(map(state_digest, self.states))}
        labels |= {"pages": " ".join(page.digest for page in self.pages if page.digest is not None)}
        labels |= {LEARNED + drafter: arrays_digest(arrays) for drafter, arrays in self.learned.items()}
        labels |= {} if rest is None else {"rest": rows_digest(rest)}
        return labels if self.name is None else labels | {"name": self.name}

    def tensors(self, rest: HostRows | None) -> dict[str, Any]:
        """The arrays and tensors of the session's file."""
        arrays = {f"{drafter}:{key}": array for drafter, state in self.learned.items() for key, array in state.items()}
        found: dict[str, Any] = {name: np.ascontiguousarray(array) for name, array in {TEXT: self.text, **arrays}.items()}
        return found | state_tensors(self.states) | ({} if rest is None else {ROWS: rest})
