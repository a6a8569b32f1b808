"""The socket between the front end and the worker: whole messages, each after its length.

Promises that the front end's side never blocks, and that each side is told when the other is gone. Knows nothing of what the
messages say.
"""

from __future__ import annotations

import asyncio
import select
import socket
import struct
from collections.abc import Callable, Iterator
from typing import cast

LENGTH = struct.Struct("<I")  # bytes of the message that follows
READ_BYTES = 1 << 16


def framed(message: bytes) -> bytes:
    """The message as it crosses."""
    return LENGTH.pack(len(message)) + message


class Frames:
    """Whole messages out of bytes that come in pieces of any size."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The messages that `data` completes."""
        self._bytes += data
        while len(self._bytes) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(self._bytes)[0]
            if len(self._bytes) < end:
                return
            yield bytes(self._bytes[LENGTH.size : end])
            del self._bytes[:end]


class WorkerSide:
    """Blocking, for the worker's loop."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._frames = Frames()
        self._poll = select.poll()
        self._poll.register(end, select.POLLIN)

    def receive(self, seconds: float) -> Iterator[bytes]:
        """The messages that are there, waiting up to `seconds` for some. Raises EOFError if the other side is gone."""
        if not self._poll.poll(1e3 * seconds):
            return iter(())
        data = self._socket.recv(READ_BYTES)
        if not data:
            raise EOFError
        return self._frames.feed(data)

    def send(self, message: bytes) -> None:
        """Waits until the system has taken the message. Raises OSError if the other side is gone."""
        self._socket.sendall(framed(message))

    def close(self) -> None:
        """Lets what was sent arrive, and ends."""
        self._socket.close()


class FrontSide(asyncio.Protocol):
    """For the event loop: calls back with each message, and once at the end."""

    def __init__(self, on_message: Callable[[bytes], None], on_end: Callable[[], None]) -> None:
        self._on_message = on_message
        self._on_end = on_end
        self._frames = Frames()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's is none by class

    def data_received(self, data: bytes) -> None:
        for message in self._frames.feed(data):
            self._on_message(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_end()

    def send(self, message: bytes) -> None:
        """Never waits; a message to a worker that is gone is dropped."""
        self._transport.write(framed(message))

    def close(self) -> None:
        """Ends the connection."""
        self._transport.close()


async def connect(on_message: Callable[[bytes], None], on_end: Callable[[], None]) -> tuple[FrontSide, socket.socket]:
    """The front end's side, and the socket that the worker's side is made of."""
    ours, theirs = socket.socketpair()
    loop = asyncio.get_running_loop()
    _, side = await loop.create_unix_connection(lambda: FrontSide(on_message, on_end), sock=ours)
    return side, theirs
