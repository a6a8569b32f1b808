"""The engine over a fake worker: every request gets its own events and ends; and messages arrive complete and in order."""

import asyncio
import socket
from contextlib import aclosing
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.server.engine import engine, messages
from outrider.server.engine import transport as wire
from outrider.server.engine.engine import MAX_UNREAD_EVENTS, DeadlineExceeded, Overloaded, ShuttingDown, WorkerLost
from outrider.server.engine.messages import (
    Cancel,
    FromWorker,
    Pause,
    Request,
    Resume,
    StepReport,
    StepTrace,
    TokenEvent,
    ToWorker,
)
from outrider.server.engine.transport import Frames, WorkerSide, framed
from outrider.verify.sampling_params import SamplingParams
from tests.server.engine.rig import READY, event, request, running


async def test_closing_the_iterator_cancels_the_request() -> None:
    async with running() as rig:
        await rig.start()
        async with aclosing(rig.engine.generate(request("a"))) as events:
            reading = asyncio.ensure_future(anext(events))
            await rig.received()
            rig.worker.send(event("a", "x"))
            assert await reading == event("a", "x")
        assert await rig.received() == [Cancel("a")]
        rig.worker.send(event("a", "late"))  # ignored: the request is cancelled
        await asyncio.sleep(0.02)


async def test_a_lost_worker_fails_running_requests_and_serves_waiting_ones() -> None:
    async with running(**{"scheduling.max_active": 1}) as rig:
        await rig.start()
        first = asyncio.ensure_future(rig.answer("a"))
        await rig.received()
        waiting = asyncio.ensure_future(rig.answer("b"))
        await asyncio.sleep(0.01)
        rig.worker.die(-9)
        with pytest.raises(WorkerLost, match="lost"):
            await first
        assert rig.engine.state == "restarting"
        async with asyncio.timeout(5):
            while len(rig.launcher.started) < 2:
                await asyncio.sleep(0.005)
        rig.worker.send(READY)
        await rig.received()
        rig.worker.send(event("b", "x", last=True))
        assert await waiting == ["x"]


async def test_silence_yields_keep_alives_and_ends_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "KEEP_ALIVE_SECONDS", 0.05)
    async with running(**{"scheduling.request_seconds": 0.2}) as rig:
        await rig.start()
        events: list[object] = []
        with pytest.raises(DeadlineExceeded, match=r"0\.2 s"):
            async for each in rig.engine.generate(request("a")):
                events.append(each)
        assert events and set(events) == {None}
        assert [type(each) for each in await rig.received()] == [Request, Cancel]


async def test_a_full_queue_and_a_drain_refuse_requests() -> None:
    async with running(**{"scheduling.max_active": 1, "scheduling.max_waiting": 0}) as rig:
        await rig.start()
        first = asyncio.ensure_future(rig.answer("a"))
        await rig.received()
        with pytest.raises(Overloaded) as raised:
            await rig.answer("b")
        assert raised.value.reason == "queue_full" and raised.value.seconds > 0
        rig.engine.drain()
        assert rig.engine.state == "draining"
        with pytest.raises(ShuttingDown):
            await rig.answer("c")
        rig.engine.abort()
        with pytest.raises(ShuttingDown):
            await first


async def test_a_stalled_reader_pauses_its_request_and_nothing_is_lost() -> None:
    async with running(**{"scheduling.max_active": 1}) as rig:
        await rig.start()
        async with aclosing(rig.engine.generate(request("stalled"))) as events:
            reading = asyncio.ensure_future(anext(events))
            await rig.received()
            for number in range(MAX_UNREAD_EVENTS + 1):
                rig.worker.send(event("stalled", str(number)))
            assert await rig.received() == [Pause("stalled")]
            assert rig.engine._queue.active == 0
            another = asyncio.ensure_future(rig.answer("another"))  # the only place is free again
            assert [cast(Request, each).id for each in await rig.received()] == ["another"]
            rig.worker.send(event("another", "x", last=True))
            assert await another == ["x"]
            texts = [cast(TokenEvent, await reading).text]
            while len(texts) <= MAX_UNREAD_EVENTS:
                texts.append(cast(TokenEvent, await anext(events)).text)
            assert texts == [str(number) for number in range(MAX_UNREAD_EVENTS + 1)]
            assert await rig.received() == [Resume("stalled")]
            rig.worker.send(event("stalled", "end", last=True))
            assert cast(TokenEvent, await anext(events)).text == "end"


async def test_a_client_has_as_many_unread_streams_as_may_run() -> None:
    """The first of too many is ended, and the worker gets its session back."""
    async with running(**{"scheduling.max_active": 2}) as rig:
        await rig.start()
        streams = [rig.engine.generate(request(id, principal="alice")) for id in "abc"]
        reading = []
        for id, stream in zip("abc", streams, strict=True):
            reading.append(asyncio.ensure_future(anext(stream)))
            await rig.received()
            for number in range(MAX_UNREAD_EVENTS + 1):
                rig.worker.send(event(id, str(number)))
            assert await rig.received(2 if id == "c" else 1) == [Pause(id)] + [Cancel("a")] * (id == "c")  # two may run
        await asyncio.gather(*reading)
        with pytest.raises(engine.Unread):
            async for _ in streams[0]:
                pass
        for stream in streams[1:]:
            await stream.aclose()


async def test_a_stream_that_nobody_reads_is_ended_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "HELD_SECONDS", 0.05)
    async with running() as rig:
        await rig.start()
        stream = rig.engine.generate(request("a"))
        reading = asyncio.ensure_future(anext(stream))
        await rig.received()
        for number in range(MAX_UNREAD_EVENTS + 1):
            rig.worker.send(event("a", str(number)))
        assert await rig.received(2) == [Pause("a"), Cancel("a")]
        await reading
        with pytest.raises(engine.Unread, match="not read in time"):
            async for _ in stream:
                pass
        assert not rig.engine._deliveries and not rig.engine._queue._places


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
