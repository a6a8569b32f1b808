"""Chooses the sessions that give way when there are too many, or when their rows take too much memory.

Every principal may use an equal share. Whoever uses more gives way first, so no principal's sessions take another's place; only
when the memory itself runs short, the largest give way whoever they belong to. Knows nothing about how a session is dropped.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from outrider.server.worker.memory_plan import RESERVED_SHARE
from outrider.server.worker.session import Session
from outrider.verify.model.cache import kv_cache
from outrider.verify.model.cache.kv_cache import Page, Rows, distinct_bytes
from outrider.verify.model.cache.shape import CacheShape
from outrider.verify.model.memory import HOST, free_bytes

# By default, the rows of all sessions may take this share of the memory that is free after the weights.
KEPT_SHARE = 0.25
# Rows and the copies of their pages may take this share of the same memory.
MEMORY_SHARE = 1 - RESERVED_SHARE


class Eviction:
    """Chooses sessions of a model with caches of `shape`."""

    def __init__(self, shape: CacheShape, capacity: int, kept_bytes: int | None, memory_bytes: int | None) -> None:
        """`capacity` bounds the number of sessions that are kept, `kept_bytes` the rows of all sessions, of which shared pages
        count once, and `memory_bytes` what these take of the host's memory; None takes a share of the memory that is free now.
        """
        free = free_bytes(HOST)
        self._capacity = capacity
        self._kept_bytes = int(KEPT_SHARE * free) if kept_bytes is None else kept_bytes
        self._memory_bytes = int(MEMORY_SHARE * free) if memory_bytes is None else memory_bytes
        self._shape = shape
        self._slots_on_host = shape.device.type == "cpu"

    def idle(self, sessions: Sequence[Session]) -> Session | None:
        """The idle session to evict, of all sessions, least recently used first; None if none has to go."""
        kept = [session for session in sessions if session.key is not None]
        idle = [session for session in kept if not session.busy]
        found = None
        if len(kept) > self._capacity:
            found = most_over(Counter(session.principal for session in kept), self._capacity, idle)
        if found is None and (sizes := self._sizes(sessions)) and sum(sizes.values()) > self._kept_bytes:
            found = most_over(sizes, self._kept_bytes, idle)
        if found is None and self.is_short(sessions):
            found = most_over(sizes, 0, idle)
        return found

    def paused(self, paused: Sequence[Session], sessions: Sequence[Session]) -> Session | None:
        """The first paused session whose rows have to go; None if none has to.

        A principal's latest one gives way only when the memory runs short: it is likely to continue soon.
        """
        with_rows = [session for session in paused if session.verifier.committed_rows]
        if not with_rows:
            return None
        sizes = self._sizes(sessions)
        if self.is_short(sessions):
            return most_over(sizes, 0, with_rows)
        if sum(sizes.values()) <= self._kept_bytes:
            return None
        latest = {session.principal: session for session in paused}
        return most_over(sizes, self._kept_bytes, [each for each in with_rows if latest[each.principal] is not each])

    def is_short(self, sessions: Sequence[Session]) -> bool:
        """Whether the sessions take more of the host's memory than they may."""
        most = 2 * self._shape.bytes_for(sum(session.verifier.committed_rows for session in sessions))
        return most > self._memory_bytes and self.resident_bytes(sessions) > self._memory_bytes

    def resident_bytes(self, sessions: Sequence[Session]) -> int:
        """The host's memory that the rows of sessions take: in slots, in pages that were swapped out, and in states."""
        total = 0
        pages: set[Page] = set()
        for session in sessions:
            rows = session.rows
            pages.update(rows.pages)
            own = rows.length - len(rows.pages) * kv_cache.PAGE_TOKENS
            in_slot = rows.length if self._slots_on_host else 0
            total += self._shape.bytes_for(own if session.verifier.is_swapped_out else in_slot)
            total += sum(state.nbytes for state in rows.snapshots)
        return total + sum(page.rows.nbytes for page in pages if page.rows is not None)

    def _sizes(self, sessions: Sequence[Session]) -> dict[str, int]:
        """The bytes of each principal's rows; principals share no pages."""
        owned: dict[str, list[Rows]] = {}
        for session in sessions:
            owned.setdefault(session.principal, []).append(session.rows)
        return {owner: distinct_bytes(rows, self._shape) for owner, rows in owned.items()}


def most_over(sizes: Mapping[str, int], limit: int, candidates: Sequence[Session]) -> Session | None:
    """The first candidate of the principal that uses most, if that is more than an equal share of the limit; else None."""
    over = [each for each in candidates if sizes[each.principal] * len(sizes) > limit]
    return max(over, key=lambda each: sizes[each.principal], default=None)
