"""Messages arrive complete and in order, however the bytes are split; each side detects when the other closes."""

import asyncio
import socket

from hypothesis import given
from hypothesis import strategies as st

from outrider.server.engine import transport as wire
from outrider.server.engine.transport import Frames, WorkerSide, framed


@given(messages=st.lists(st.binary(max_size=300)), piece=st.integers(1, 100))
def test_messages_do_not_depend_on_how_the_bytes_are_split(messages: list[bytes], piece: int) -> None:
    stream = b"".join(framed(message) for message in messages)
    frames = Frames()
    found = [m for at in range(0, len(stream), piece) for m in frames.feed(stream[at : at + piece])]
    assert found == messages


async def test_messages_pass_in_both_directions() -> None:
    received_by_front: asyncio.Queue[bytes | None] = asyncio.Queue()
    ours, theirs = socket.socketpair()
    front = await wire.connect(ours, received_by_front.put_nowait, lambda: received_by_front.put_nowait(None))
    worker = WorkerSide(theirs)
    assert list(worker.receive(0)) == []
    large = bytes(1 << 20)  # larger than the socket buffer: the front end must not block on it
    front.send(large)
    front.send(b"small")
    received: list[bytes] = []
    while len(received) < 2:
        received += await asyncio.to_thread(lambda: list(worker.receive(5)))
    assert received == [large, b"small"]
    worker.send(b"answer")
    assert await received_by_front.get() == b"answer"
    worker.close()
    assert await received_by_front.get() is None
    for _ in range(10):
        front.send(b"late")  # dropped
