"""Sessions: a conversation's KV cache and its drafters' state, kept between requests up to a capacity.

A request continues the session that it names, or the one whose text its prompt continues. If the prompt only begins like a
session's text, the shared beginning is copied to another slot and that session stays as it is. Where sessions are found by
text, a name is a hint: a request waits for no session of its name, and reuses no less than without one. In host memory and in
the bytes that are counted, the pages of a shared beginning exist once.

Promises that two principals never share a session.
"""

import logging
import time
from collections.abc import Callable, Sequence

from outrider.drafters.interface import Ints
from outrider.server.worker.eviction import Eviction
from outrider.server.worker.saver import Saver
from outrider.server.worker.session import Directory, Session, SessionKey
from outrider.server.worker.slots import Slots
from outrider.server.worker.storage.prefix_index import BLOCK_TOKENS
from outrider.server.worker.storage.session_files import SessionFiles
from outrider.server.worker.storage.session_format import DamagedSession, StoredSession
from outrider.verify.model.cache.kv_cache import KVCache
from outrider.verify.model.runner import ModelRunner
from outrider.verify.verifier import Verifier

log = logging.getLogger("outrider.worker")


class SessionStore:
    """The worker's sessions. Evicts idle ones beyond `capacity` or `kv_bytes`, and those idle for longer than `ttl_seconds`.

    Busy and recently used sessions hold a slot (a KV cache on the device). The others are swapped out to host memory when
    their slot is needed: idle sessions first, then those whose request is paused.
    """

    def __init__(
        self,
        runner: ModelRunner,
        capacity: int,
        ttl_seconds: float,
        slots: int | None = None,
        automatic: bool = False,
        kv_bytes: int | None = None,
        memory_bytes: int | None = None,
        files: SessionFiles | None = None,
        clock: Callable[[], float] = time.monotonic,
        learn: Callable[[str, SessionKey, Ints], None] = lambda principal, session, text: None,
    ) -> None:
        """`slots` is the number of KV caches on the device; default: `capacity` + 1. With `automatic`, sessions are also
        found by their text, and kept for requests that name none. `kv_bytes` bounds the committed rows of all sessions,
        of which shared pages count once, and `memory_bytes` what they take of the host's memory; defaults: shares of the free
        memory. Sessions in `files` are restored.
        `learn` gets the principal and the text of a kept session after each request."""
        self._runner = runner
        self._ttl_seconds = ttl_seconds
        self._automatic = automatic
        self._clock = clock
        self._learn = learn
        self._eviction = Eviction(runner.cache_shape, capacity, kv_bytes, memory_bytes)
        self._sessions = Directory()
        self._changes = 0  # number of changes after which a waiting request may find a session or a slot
        self._reading: list[tuple[Session, int]] = []  # sessions whose first rows requests wait for, and their number
        self._unnamed: list[Session] = []  # busy, and dropped after their request
        # Busy with a paused request; first paused first. A request that waits to continue may be paused once more.
        self._paused: dict[Session, None] = {}
        self._slots = Slots(runner, capacity + 1 if slots is None else slots, self._swappable)
        self._files = files
        self._saver = None if files is None else Saver(files, clock)
        for stored in files.load() if files else ():
            self._restore(stored)
        self.expire()

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def slots(self) -> int:
        """The number of KV caches on the device."""
        return self._slots.count

    def usage_ratio(self, with_idle: bool = True) -> float:
        """The share of the slots' positions that hold committed tokens, or that those of running requests hold."""
        held = (each for each in self._sessions.values() if not each.verifier.is_swapped_out and (with_idle or each.busy))
        used = sum(len(session.text) for session in held)
        return used / (self._runner.context_tokens * self.slots)

    @property
    def changes(self) -> int:
        """A number that changes when a request that has to wait should try again."""
        read = [each for each in self._reading if not each[0].busy or each[0].verifier.committed_rows >= each[1]]
        if read:
            self._reading.clear()
            self._changes += 1
        return self._changes

    def awaited_rows(self, session: Session) -> list[int]:
        """The numbers of the session's rows that requests wait for."""
        return [rows for source, rows in self._reading if source is session]

    def acquire(self, principal: str, name: str | None, prompt: Ints, temporary: bool = False) -> Session | None:
        """The session for a request with this prompt, int32 [P]. Returns None while it has to wait.

        It waits while its session or every slot is busy, and while another request reads the beginning that both share.
        The name of a `temporary` session is no hint: all its requests have it, whatever their prompts.
        """
        self._stop_saving()
        self.expire()
        while True:
            self._load_changed(principal, name, prompt)
            try:
                return self._find_or_create(principal, name, prompt, temporary)
            except DamagedSession as error:
                log.warning("a stored session is dropped: %s", error)
                for key in [key for key, session in self._sessions.items() if session.file == error.path]:
                    self.forget(key)

    def _find_or_create(self, principal: str, name: str | None, prompt: Ints, temporary: bool) -> Session | None:
        """`acquire`, once. Raises DamagedSession."""
        source, shared = self._sessions.nearest(principal, prompt) if self._automatic else (None, 0)
        named = None if name is None else self._sessions.get(SessionKey(principal, name))
        is_hint, session = self._automatic and not temporary, None
        if named is not None and (not is_hint or named.is_meant(prompt, shared)):
            session = named
        elif source is not None and source.continues(prompt, shared) and (name is None or is_hint):
            session = source
        if named is not None and session is not named:
            named.check_readable()  # it will lose its file
        if session is None:
            session = self._create(source, shared, named)
        elif session.busy or not self._swap_in(session):
            session = None
        else:
            session.reuse = "continued"
        if session is not None:
            session.busy, session.principal = True, principal
            self._name(session, name, prompt)
        return session

    def _name(self, session: Session, name: str | None, prompt: Ints) -> None:
        """Gives a session its key and its file. Who had the name keeps its text under a number, and gets a file when saved."""
        before, principal = session.key, session.principal
        if name is None and not self._automatic:
            self._unnamed.append(session)
            return
        key = before if name is None and before is not None else self._sessions.new_key(principal, name)
        if name is not None and key != before:
            if (holder := self._sessions.get(key)) is not None:
                self._sessions.put(holder, self._sessions.new_key(principal), holder.text.tokens)
                holder.file, holder.stored, holder.saved = None, None, False
                self._keep(holder)
            if self._files is not None:
                if session.file is not None:
                    self._files.remove(session.file)
                session.file, session.stored = self._files.path_of(principal, name, prompt), None  # the same for every server
        self._sessions.put(session, key, prompt)

    def _create(self, source: Session | None, shared: int, named: Session | None) -> Session | None:
        """A new session, which begins with the tokens shared with `source`; None if it has to wait.

        Without such tokens, it has what the drafters of `named` have learned.
        """
        if source is None:
            slot = self._slots.take()
        else:
            rows = source.verifier.committed_rows
            if rows < shared - 1 and source.busy and source not in self._paused:
                self._reading.append((source, shared - 1))
                return None
            slot = self._slots.take_for(source, shared)
        if slot is None:
            return None
        if source is None or min(shared, source.verifier.committed_rows) < BLOCK_TOKENS:
            return Session(Verifier(self._runner, slot)) if named is None else named.fork(slot, 0)
        with self._slots.returned_on_error(slot, source):
            session = source.fork(slot, shared)
        session.reuse = "forked"
        return session

    def _swap_in(self, session: Session) -> bool:
        """Gives the session a slot if it has none; returns False while every slot is busy."""
        if session.verifier.is_swapped_out:
            if not self._slots.swap_in(session):
                return False
            self._drop_copies(session)
        return True

    def _swappable(self) -> list[Session]:
        """The sessions that can be swapped out, those that need their slots least first."""
        self._stop_saving()
        return [*(session for session in self._sessions.values() if not session.busy), *self._paused]

    def fits(self, wanted: Sequence[tuple[KVCache, int]]) -> bool:
        """Whether each cache has room for its number of new rows. Swaps idle and paused sessions out to make room."""
        return self._slots.fits(wanted)

    def pause(self, session: Session) -> None:
        """Lets others use the slot of a busy session until `resume`, and its memory if its principal has too much."""
        self._paused.setdefault(session)
        self._changes += 1
        self.trim()

    def resume(self, session: Session) -> bool:
        """Gives a paused session a slot again; returns False while every slot is busy."""
        if not self._swap_in(session):
            return False
        del self._paused[session]
        return True

    def release(self, session: Session) -> None:
        """Ends the use of `session` by a request."""
        self._changes += 1
        session.busy = session.saved = False
        session.stored = None
        session.released_at = self._clock()
        self._paused.pop(session, None)
        if session.key is None:
            self._unnamed.remove(session)
            self._drop(session)
        else:
            self._sessions.reindex(session)
            self._keep(session)
        self.expire()

    def _keep(self, session: Session) -> None:
        """Learns from a session that is idle, and drops it if it is too short to be found again."""
        assert session.key is not None
        if session.busy:
            return
        self._learn(session.key.principal, session.key, session.text.tokens)
        if isinstance(session.key.name, int) and len(session.text) < BLOCK_TOKENS:
            self.forget(session.key)

    def forget(self, key: SessionKey, remove: bool = True) -> None:
        """Drops a session that is idle, and removes its file unless `remove` is False or another process has written it."""
        session = self._sessions.get(key)
        if session is not None and not session.busy:
            self._stop_saving()
            self._changes += 1
            self._drop(self._sessions.take(key))
            if remove and self._files is not None and session.file is not None:
                self._files.remove(session.file)

    def save(self) -> None:
        """Begins to save an idle session that has changed since it was saved, if none is being saved."""
        if self._saver is not None:
            self._saver.save_next(self._sessions.values())

    def save_all(self, seconds: float) -> None:
        """Saves all idle sessions that have changed, as far as the time allows; the most recently used first."""
        if self._saver is not None:
            self._saver.save_all(reversed(self._sessions.values()), seconds)

    def _stop_saving(self) -> None:
        """Ends the reading of a session's rows, before any session changes. It takes as long as one page."""
        if self._saver is not None:
            self._saver.stop()

    def _load_changed(self, principal: str, name: str | None, prompt: Ints) -> None:
        """Restores the sessions that other processes have saved and this request may continue."""
        if self._files is None:
            return
        known = {session.file: key for key, session in self._sessions.items() if session.file}
        for path in self._files.candidates(principal, name, prompt if self._automatic else None):
            key = known.get(path)
            session = None if key is None else self._sessions[key]
            if session is not None and (session.busy or not session.saved or self._files.is_current(path)):
                continue
            if key is not None:
                self.forget(key, remove=False)
            if stored := self._files.open(path):
                self._restore(stored)

    def _restore(self, stored: StoredSession) -> None:
        """Adds a saved session. One of its name that is in memory is kept if it is in use or newer, and else dropped."""
        key = self._sessions.new_key(stored.principal, stored.name)
        held = self._sessions.get(key)
        if held is not None and (held.busy or not held.saved):
            return
        if held is not None:
            self.forget(key, remove=False)  # else its slot would be lost
        verifier = Verifier.restored(self._runner, stored.text, stored.prompt_tokens, stored.rows)
        session = Session(verifier, principal=key.principal, stored=stored, file=stored.path, saved=True)
        session.released_at = self._clock()
        self._sessions.put(session, key, stored.text)

    def expire(self) -> int:
        """Evicts idle sessions beyond the capacity, the memory or the time to live; returns their number."""
        before, now = len(self._sessions), self._clock()
        for key, session in list(self._sessions.items()):
            if not session.busy and now - session.released_at > self._ttl_seconds:
                self.forget(key)
        self.trim()
        return before - len(self._sessions)

    def trim(self) -> None:
        """Evicts idle sessions beyond the bounds; then drops rows of paused ones, which read them again."""
        while (idle := self._eviction.idle(self._all)) is not None:
            assert idle.key is not None
            self.forget(idle.key, remove=False)
        while (paused := self._eviction.paused([*self._paused], self._all)) is not None:
            self._slots.give_back(paused.verifier.drop_rows())

    @property
    def is_short(self) -> bool:
        """Whether the rows take more memory than they may, because requests have grown."""
        return self._eviction.is_short(self._all)

    @property
    def _all(self) -> list[Session]:
        return [*self._sessions.values(), *self._unnamed]

    def _drop(self, session: Session) -> None:
        self._slots.give_back(session.verifier.release())

    def _drop_copies(self, session: Session) -> None:
        """Frees the copies of pages that a session's slot on a CPU holds as well, unless another session needs them."""
        if self._runner.device.type == "cpu":
            others = (each.rows for each in self._sessions.values() if each.verifier.is_swapped_out)
            needed = {page for rows in others for page in rows.pages}
            for page in session.rows.pages:
                if page not in needed:
                    page.rows = None
