"""The memory of bodies that are being received: bounded for all clients, and for each.

Small bodies are not counted: the number of connections bounds them. A large body is read only once it has room for all of its
bytes, so bodies that never end keep no others from ending, except those of the same client.
"""

import asyncio
import ctypes
import sys
from collections import Counter
from contextlib import suppress

# uvicorn buffers as much of a body that nobody reads.
SMALL_BYTES = 1 << 16
# Memory is returned this long after a large body has been given back, when nobody refers to it any more.
RETURN_SECONDS = 1.0
TOTAL_BYTES, CLIENT_BYTES = 64 << 20, 16 << 20


class BodyBudget:
    """Divides the bytes among clients. All methods are called on the event loop."""

    def __init__(self, total_bytes: int = TOTAL_BYTES, client_bytes: int = CLIENT_BYTES) -> None:
        self._total_bytes, self._client_bytes = total_bytes, client_bytes
        self._held: Counter[str] = Counter()  # bytes by client
        self._given = asyncio.Event()  # set when bytes are given back, and then replaced
        self._returning: asyncio.TimerHandle | None = None

    async def take(self, client: str, size: int) -> int:
        """Waits for room for a body of `size` bytes; returns the bytes to give back by `give`."""
        size = min(size, self._client_bytes)
        while self._held.total() + size > self._total_bytes or self._held[client] + size > self._client_bytes:
            await self._given.wait()
        self._held[client] += size
        return size

    def give(self, client: str, size: int) -> None:
        """Gives the bytes of a body back."""
        self._held[client] -= size
        if not self._held[client]:
            del self._held[client]
        self._given.set()
        self._given = asyncio.Event()
        if self._returning is None:
            self._returning = asyncio.get_running_loop().call_later(RETURN_SECONDS, self._return)

    def _return(self) -> None:
        """Returns the memory of freed bodies to the system, which glibc would keep."""
        self._returning = None
        if sys.platform == "linux":
            with suppress(AttributeError):  # another C library
                ctypes.CDLL(None).malloc_trim(0)
