"""The worker's slots: KV caches on the device, which sessions take, give back, and lose to others that need them more.

Knows nothing about which session a request continues.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from outrider.server.worker.session import Session
from outrider.server.worker.storage.session_format import DamagedSession, StoredRows
from outrider.verify.errors import lost_device
from outrider.verify.model.cache.kv_cache import KVCache
from outrider.verify.model.runner import ModelRunner


class Slots:
    """A fixed number of slots. When none is free, one is taken from a session, which is swapped out to host memory."""

    def __init__(self, runner: ModelRunner, count: int, swappable: Callable[[], Iterable[Session]]) -> None:
        """`swappable` returns the sessions that can be swapped out, or are, those that need their slots least first."""
        self.count = count
        self._runner = runner
        self._swappable = swappable
        self._free = [runner.new_cache() for _ in range(count)]

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> KVCache | None:
        if not self._free:
            self.swap_out()
        return self._free.pop() if self._free else None

    def give_back(self, slot: KVCache | None) -> None:
        """Frees a slot that holds no committed rows; returns its memory to the system."""
        if slot is not None:
            slot.discard()
            self._free.append(slot)

    def fits(self, wanted: Sequence[tuple[KVCache, int]]) -> bool:
        """Whether each cache has room for its number of new rows. Swaps sessions out to make room."""
        while (free := self._runner.free_pages) is not None and sum(each.missing_pages(rows) for each, rows in wanted) > free:
            if not self.swap_out():
                return False
        return True

    def take_for(self, source: Session, rows: int) -> KVCache | None:
        """A slot with room for this number of the session's rows; None if all are in use. Raises DamagedSession."""
        source.check_readable()
        slot = self.take()
        if slot is not None and source.verifier.is_swapped_out and not self.fits([(slot, rows)]):
            self._free.append(slot)
            return None
        return slot

    def swap_in(self, session: Session) -> bool:
        """Gives a session that is swapped out a slot; returns False if all are in use. Raises DamagedSession."""
        slot = self.take_for(session, session.verifier.committed_rows)
        if slot is None:
            return False
        with self.returned_on_error(slot, session):
            session.verifier.swap_in(slot)
        return True

    @contextmanager
    def returned_on_error(self, slot: KVCache, source: Session) -> Iterator[None]:
        """Returns a slot that a session's rows could not be copied to. Raises DamagedSession if they came from a file."""
        try:
            yield
        except lost_device():
            raise
        except Exception as error:
            slot.truncate(0)
            self._free.append(slot)
            if not isinstance(rows := source.rows, StoredRows):
                raise
            raise DamagedSession(rows.path, f"its rows do not fit this model: {error}") from None

    def swap_out(self) -> bool:
        """Frees the slot of the session that needs it least; returns False if there is none."""
        for session in self._swappable():
            if not session.verifier.is_swapped_out:
                self.give_back(session.verifier.swap_out())
                return True
        return False
