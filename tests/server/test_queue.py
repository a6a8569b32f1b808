"""Turns come in order, as many at once as allowed; the queue is bounded; nobody who left holds a place."""

import asyncio
from collections.abc import Callable

import pytest

from server.queue import Queue, QueueFull


def in_loop(body: Callable[[], None]) -> None:
    async def run() -> None:
        body()

    asyncio.run(run())


def test_turns_come_in_order() -> None:
    def body() -> None:
        queue = Queue(max_active=2, max_waiting=10)
        queue.open()
        turns = {name: queue.enter(name) for name in "abcd"}
        assert [name for name, turn in turns.items() if turn.done()] == ["a", "b"]
        assert (queue.active, queue.waiting) == (2, 2)
        queue.leave("b")
        assert turns["c"].done() and not turns["d"].done()
        queue.leave("b")  # twice is once
        assert not turns["d"].done()

    in_loop(body)


def test_the_queue_is_bounded() -> None:
    def body() -> None:
        queue = Queue(max_active=1, max_waiting=1)
        queue.open()
        queue.enter("a"), queue.enter("b")
        with pytest.raises(QueueFull):
            queue.enter("c")
        queue.enter("d", always=True)
        assert queue.waiting == 2

    in_loop(body)


def test_who_leaves_or_is_cancelled_holds_no_place() -> None:
    def body() -> None:
        queue = Queue(max_active=1, max_waiting=10)
        queue.open()
        queue.enter("a")
        gone, cancelled, last = (queue.enter(name) for name in "bcd")
        queue.leave("b")
        cancelled.cancel()
        queue.leave("a")
        assert last.done() and not gone.done()

    in_loop(body)


def test_a_closed_queue_keeps_who_waits() -> None:
    def body() -> None:
        queue = Queue(max_active=1, max_waiting=10)
        early = queue.enter("a")
        assert not early.done()
        queue.open()
        late = queue.enter("b")
        assert queue.close() == ["a"]
        queue.leave("a")
        assert early.done() and not late.done()
        queue.open()
        assert late.done()

    in_loop(body)


def test_failure_reaches_who_waits() -> None:
    def body() -> None:
        queue = Queue(max_active=1, max_waiting=10)
        turn = queue.enter("a")
        queue.fail(RuntimeError("no worker"))
        with pytest.raises(RuntimeError, match="no worker"):
            turn.result()

    in_loop(body)


def test_a_lower_number_comes_first() -> None:
    def body() -> None:
        queue = Queue(max_active=1, max_waiting=10)
        queue.open()
        queue.enter("a")
        turns = {name: queue.enter(name, priority=priority) for name, priority in (("b", 1), ("c", -1), ("d", 1), ("e", -1))}
        came = []
        for leaving in ("a", "c", "e", "b"):
            queue.leave(leaving)
            came += [name for name, turn in turns.items() if turn.done() and name not in came]
        assert came == ["c", "e", "b", "d"]

    in_loop(body)
