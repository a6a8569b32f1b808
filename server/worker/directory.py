"""Sessions by their keys, and by the beginnings of their texts. Knows nothing about slots and files."""

from __future__ import annotations

import itertools
from collections import OrderedDict

from outrider.drafters.interface import Ints
from outrider.drafters.sequence import common_prefix
from outrider.server.worker.session import Session, SessionKey
from outrider.server.worker.storage.prefix_index import BLOCK_TOKENS, PrefixIndex


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
        """Removes a session."""
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
