"""Messages are encoded without loss and arrive complete and in order; each side detects when the other closes."""

import asyncio
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.server.engine import messages
from outrider.server.engine import transport as wire
from outrider.server.engine.messages import FromWorker, StepReport, StepTrace, ToWorker
from outrider.server.engine.transport import Frames, WorkerSide, framed
from outrider.verify.sampling_params import SamplingParams


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


SHORT = [messages.Cancel("r"), messages.Pause("r"), messages.Resume("r"), messages.Forget("p", "s"), messages.Shutdown()]
TRACE = StepTrace([5, 6], [-1, 0], [0.5, 0.25], ["trigram", "lookup"], [0], None, 4, 1.5, 1.2)
REPORT = StepReport(0.1, 0.2, 0.3, {"trigram": 4}, {"trigram": 1}, TRACE)


@pytest.mark.parametrize(
    "message", [messages.Request("r", [1, 2], SamplingParams(seed=(1 << 64) - 1), 5, ("x",), "s", True, "none", 3), *SHORT]
)
def test_messages_to_the_worker_round_trip(message: ToWorker) -> None:
    assert messages.decode_to_worker(messages.encode(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        messages.Ready(10, "cpu", "float32", 1.0, 2, 1000, 2, "off", 4.5, "int8", messages.Memory(10, 11, 12, None)),
        messages.Refused("no"),
        messages.TokenEvent("r", [1], "é", "stop", REPORT, 3),
        messages.Failed("r", "no"),
        messages.Status(1, 0.5),
    ],
)
def test_messages_from_the_worker_round_trip(message: FromWorker) -> None:
    assert messages.decode_from_worker(messages.encode(message)) == message
