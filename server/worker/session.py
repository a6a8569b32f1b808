"""One conversation's state between requests: its text and KV cache, and what its drafters have learned.

A directory finds sessions by their keys, and by the beginnings of their texts.
"""

from __future__ import annotations

import itertools
import logging
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from outrider.drafters.interface import Drafter, Ints
from outrider.drafters.options import DrafterName
from outrider.drafters.registry import Resources, clone, load, make
from outrider.drafters.sequence import Sequence, common_prefix
from outrider.drafters.state import StateError
from outrider.server.engine.messages import Reuse
from outrider.server.worker.storage.prefix_index import BLOCK_TOKENS, PrefixIndex
from outrider.server.worker.storage.session_format import StoredRows, StoredSession
from outrider.verify.model.cache.kv_cache import KVCache, Rows
from outrider.verify.verifier import Verifier

log = logging.getLogger("outrider.worker")
# A prompt continues a conversation although its last tokens differ from the earlier prompt's: the end of a rendered
# conversation changes when the next message follows.
CHANGED_TOKENS = 32


class SessionKey(NamedTuple):
    """Names a session. Names are scoped to their principal; sessions without a name are numbered."""

    principal: str
    name: str | int


@dataclass(eq=False)
class Session:
    verifier: Verifier
    drafters: dict[DrafterName, Drafter] = field(default_factory=dict)
    principal: str = ""  # the principal that owns the session and its memory
    key: SessionKey | None = None  # None = the session leaves no state
    reuse: Reuse = "new"  # how the current request came by the session
    stored: StoredSession | None = None  # what the session was restored from, until its first request
    file: Path | None = None  # where the session is saved
    saved: bool = False  # the file holds the session as it is
    busy: bool = False
    released_at: float = 0.0  # the clock's time at the last release

    @property
    def text(self) -> Sequence:
        return self.verifier.sequence

    @property
    def rows(self) -> Rows:
        return self.verifier.rows

    def drafter(self, name: DrafterName, resources: Resources) -> Drafter:
        """The session's drafter of this name, made at first use."""
        if name not in self.drafters:
            restored = self._restored(name, resources)
            self.drafters[name] = make(name, resources) if restored is None else restored
        return self.drafters[name]

    def _restored(self, name: DrafterName, resources: Resources) -> Drafter | None:
        """The drafter that was saved with the session; None if there is none, or if it cannot be used, which is logged."""
        if self.stored is None or not (learned := self.stored.learned(name)):
            return None
        try:
            return load(name, resources, learned, self.text)
        except StateError as error:
            log.warning("what %s has learned in a saved session is not used: %s", name, error)
            return None

    def continues(self, prompt: Ints, shared: int) -> bool:
        """Whether a prompt without a session name, whose first `shared` tokens are this text, is this session's next one."""
        if self.busy or self.key is None or isinstance(self.key.name, str):
            return False
        last = self.text.prompt_length
        return len(prompt) > last and shared >= last - CHANGED_TOKENS

    def is_meant(self, prompt: Ints, shared: int) -> bool:
        """Whether a request that names this session continues it, though it could fork one that shares `shared` tokens.

        A prompt that leaves the last one early is another conversation of this name, or an edited one, and replaces no text.
        One that is repeated, for another choice, replaces its answer.
        """
        own, last = common_prefix(prompt, self.text.tokens), self.text.prompt_length
        return not self.busy and own >= max(shared, last - CHANGED_TOKENS) and (len(prompt) > last or own == len(prompt))

    @property
    def has_changed(self) -> bool:
        """Whether it is idle, and its file does not hold it as it is."""
        return not (self.busy or self.saved) and self.verifier.committed_rows > 0

    def check_readable(self) -> None:
        """Reads the session's rows if they are in files. Raises DamagedSession if these cannot be used."""
        if isinstance(rows := self.rows, StoredRows):
            rows.read()

    def fork(self, slot: KVCache, length: int) -> Session:
        """A session in `slot` with the first `length` tokens of this one's text, and what its drafters have learned."""
        verifier = self.verifier.clone(slot, length)
        text, cloned = self.text, verifier.sequence
        return Session(verifier, {name: clone(drafter, text, cloned) for name, drafter in self.drafters.items()})

    def reset(self) -> None:
        """Drops text and drafters, whose state is unknown after an error."""
        if self.verifier.is_swapped_out:
            self.verifier.drop_rows()
            self.text.truncate(0)
        else:
            self.verifier.truncate(0)
        self.drafters.clear()


class Directory(OrderedDict[SessionKey, Session]):
    """The sessions that later requests may find, least recently used first."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers = itertools.count()
        self._index: PrefixIndex[SessionKey] = PrefixIndex()

    def new_key(self, principal: str, name: str | None = None) -> SessionKey:
        """The key of a session; a number stands for a name."""
        return SessionKey(principal, next(self._numbers) if name is None else name)

    def put(self, session: Session, key: SessionKey, text: Ints) -> None:
        """Adds a session, or changes its key, as the most recently used one. Its text, int32 [N], will be `text`."""
        if session.key is not None and session.key != key:
            self.take(session.key)
        session.key = key
        self[key] = session
        self.move_to_end(key)
        self._index.put(key, key.principal, text)

    def reindex(self, session: Session) -> None:
        """Finds a session by the text that it has now."""
        assert session.key is not None
        self._index.put(session.key, session.key.principal, session.text.tokens)

    def take(self, key: SessionKey) -> Session:
        self._index.remove(key)
        return self.pop(key)

    def nearest(self, principal: str, prompt: Ints) -> tuple[Session | None, int]:
        """The principal's session whose text shares the longest beginning with the prompt, and that beginning's length."""
        nearest, longest = None, (0, False, False)
        for session in (self[key] for key in self._index.find(principal, prompt)):
            shared = common_prefix(prompt, session.text.tokens)
            rank = (shared, session.continues(prompt, shared), not session.busy)
            if shared >= BLOCK_TOKENS and rank > longest:
                nearest, longest = session, rank
        return nearest, longest[0]
