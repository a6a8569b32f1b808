"""The memory of bodies that are being received: bounded for all clients, and for each.

Small bodies are not counted: the number of connections bounds them. A large body is read only once it has room for all of its
bytes, so bodies that never end keep no others from ending, except those of the same client.
"""

from __future__ import annotations

import asyncio
import ctypes
import sys
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass

# uvicorn buffers as much of a body that nobody reads.
SMALL_BYTES = 1 << 16
# Memory is returned this long after a large body has been given back, when nobody refers to it any more.
RETURN_SECONDS = 1.0
TOTAL_BYTES, CLIENT_BYTES = 64 << 20, 16 << 20


@dataclass(eq=False)
class Waiting:
    """A body that waits for room."""

    client: str
    size: int
    room: asyncio.Future[None]


class BodyBudget:
    """Divides the bytes among clients. All methods are called on the event loop."""

    def __init__(self, total_bytes: int = TOTAL_BYTES, client_bytes: int = CLIENT_BYTES) -> None:
        self._total_bytes, self._client_bytes = total_bytes, client_bytes
        self._held: Counter[str] = Counter()  # bytes by client
        self._waiting: list[Waiting] = []  # in order of arrival
        self._returning: asyncio.TimerHandle | None = None

    async def take(self, client: str, size: int) -> int:
        """Waits for room for a body of `size` bytes; returns the bytes to give back by `give`."""
        size = min(size, self._client_bytes)
        waiting = Waiting(client, size, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._grant()
        try:
            await waiting.room
        except asyncio.CancelledError:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
            else:
                self.give(client, size)  # the room has come at the same time
            raise
        return size

    def give(self, client: str, size: int) -> None:
        """Gives the bytes of a body back."""
        self._held[client] -= size
        if not self._held[client]:
            del self._held[client]
        self._grant()
        if self._returning is None:
            self._returning = asyncio.get_running_loop().call_later(RETURN_SECONDS, self._return)

    def _return(self) -> None:
        """Returns the memory of freed bodies to the system, which glibc would keep."""
        self._returning = None
        if sys.platform == "linux":
            with suppress(AttributeError):  # another C library
                ctypes.CDLL(None).malloc_trim(0)

    def _grant(self) -> None:
        for waiting in list(self._waiting):
            fits = self._held.total() + waiting.size <= self._total_bytes
            if waiting.room.cancelled():
                self._waiting.remove(waiting)
            elif fits and self._held[waiting.client] + waiting.size <= self._client_bytes:
                self._waiting.remove(waiting)
                self._held[waiting.client] += waiting.size
                waiting.room.set_result(None)
