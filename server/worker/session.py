"""One conversation's state between requests: its text and KV cache, and what its drafters have learned."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from outrider.drafters.interface import Drafter, Ints
from outrider.drafters.options import DrafterName
from outrider.drafters.registry import Resources, clone, load, make
from outrider.drafters.sequence import Sequence, common_prefix
from outrider.drafters.state import StateError
from outrider.server.engine.messages import Reuse
from outrider.server.worker.storage.session_format import StoredRows, StoredSession
from outrider.verify.model.cache.kv_cache import KVCache
from outrider.verify.model.cache.paging import Rows
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
    """The state of one conversation."""

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
        """All tokens of the session."""
        return self.verifier.sequence

    @property
    def rows(self) -> Rows:
        """The session's keys and values."""
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
