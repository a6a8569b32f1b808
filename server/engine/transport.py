"""The socket between the front end and the worker: length-prefixed messages.

Promises that the front end's side never blocks, and that each side detects when the other closes. Knows nothing about the
messages' content.
"""

import asyncio
import select
import socket
import struct
from collections.abc import Callable, Iterator
from typing import cast

# Each message follows its length in bytes.
LENGTH = struct.Struct("<I")
READ_BYTES = 1 << 16


def framed(message: bytes) -> bytes:
    """The message, prefixed with its length."""
    return LENGTH.pack(len(message)) + message


class Frames:
    """Reassembles messages from a byte stream."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The messages that `data` completes."""
        self._bytes += data
        while len(self._bytes) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(self._bytes)[0]
            if len(self._bytes) < end:
                return
            message = bytes(self._bytes[LENGTH.size : end])
            del self._bytes[:end]
            yield message


class WorkerSide:
    """The worker's blocking side."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._frames = Frames()
        self._poll = select.poll()
        self._poll.register(end, select.POLLIN)

    def receive(self, seconds: float) -> Iterator[bytes]:
        """The messages that arrive; waits up to `seconds` for data. Raises EOFError if the other side has closed."""
        if not self._poll.poll(1e3 * seconds):
            return iter(())
        data = self._socket.recv(READ_BYTES)
        if not data:
            raise EOFError
        return self._frames.feed(data)

    def send(self, message: bytes) -> None:
        """Blocks until the message is in the socket's buffer. Raises OSError if the other side has closed."""
        self._socket.sendall(framed(message))

    def wait_closed(self) -> None:
        """Blocks until the other side closes; reads nothing. Call it in its own thread."""
        hang_up = select.poll()
        hang_up.register(self._socket, 0)  # POLLHUP and POLLERR are always reported
        hang_up.poll()

    def close(self) -> None:
        """Closes the socket; messages already sent still arrive."""
        self._socket.close()


class FrontSide(asyncio.Protocol):
    """The front end's side, on the event loop: calls back with each message, and once when the connection ends."""

    def __init__(self, on_message: Callable[[bytes], None], on_end: Callable[[], None]) -> None:
        self._on_message = on_message
        self._on_end = on_end
        self._frames = Frames()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's transport does not subclass it

    def data_received(self, data: bytes) -> None:
        for message in self._frames.feed(data):
            self._on_message(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_end()

    def send(self, message: bytes) -> None:
        """Never blocks. A message to a worker that has ended is dropped."""
        if not self._transport.is_closing():
            self._transport.write(framed(message))

    def close(self) -> None:
        """Closes the connection at once; messages that the worker has not read yet are dropped."""
        self._transport.abort()


async def connect(end: socket.socket, on_message: Callable[[bytes], None], on_end: Callable[[], None]) -> FrontSide:
    """Connects the front end's side to its end of the socket, and takes ownership of that end."""
    loop = asyncio.get_running_loop()
    _, side = await loop.create_unix_connection(lambda: FrontSide(on_message, on_end), sock=end)
    return side
