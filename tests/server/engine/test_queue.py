"""The queue is fair, ordered and bounded, and removed requests hold no place."""

import asyncio
from collections.abc import Callable

import pytest

from server.engine.queue import Queue, QueueFull


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
        queue.leave("b")  # no effect the second time
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


def test_left_and_cancelled_requests_get_no_turn() -> None:
    def body() -> None:
        queue = Queue(max_active=1, max_waiting=10)
        queue.open()
        queue.enter("a")
        left, cancelled, last = (queue.enter(name) for name in "bcd")
        queue.leave("b")
        cancelled.cancel()
        queue.leave("a")
        assert last.done() and not left.done()

    in_loop(body)


def test_a_closed_queue_keeps_waiting_requests() -> None:
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


def test_a_failure_ends_waiting_requests() -> None:
    def body() -> None:
        queue = Queue(max_active=1, max_waiting=10)
        turn = queue.enter("a")
        queue.fail(RuntimeError("no worker"))
        with pytest.raises(RuntimeError, match="no worker"):
            turn.result()

    in_loop(body)


def test_lower_priority_numbers_run_first() -> None:
    def body() -> None:
        queue = Queue(max_active=1, max_waiting=10)
        queue.open()
        queue.enter("a")
        turns = {name: queue.enter(name, priority=priority) for name, priority in (("b", 1), ("c", -1), ("d", 1), ("e", -1))}
        granted = []
        for leaving in ("a", "c", "e", "b"):
            queue.leave(leaving)
            granted += [name for name, turn in turns.items() if turn.done() and name not in granted]
        assert granted == ["c", "e", "b", "d"]

    in_loop(body)


def test_the_queue_is_bounded_by_tokens() -> None:
    def body() -> None:
        queue = Queue(max_active=1, max_waiting=10, max_waiting_tokens=100)
        queue.open()
        queue.enter("a", tokens=500)  # running, so it does not count
        queue.enter("b", tokens=500)  # accepted, because the queue is empty
        with pytest.raises(QueueFull, match="a prompt of this length") as raised:
            queue.enter("c", tokens=1)
        assert raised.value.reason == "tokens"
        queue.leave("b")
        queue.enter("d", tokens=60), queue.enter("e", tokens=40)
        assert queue.waiting_tokens == 100
        with pytest.raises(QueueFull):
            queue.enter("f", tokens=1)

    in_loop(body)


def test_the_retry_time_follows_the_measured_rate() -> None:
    def body() -> None:
        now = [0.0]
        queue = Queue(max_active=2, max_waiting=4, clock=lambda: now[0])
        queue.open()
        for number in range(200):
            queue.enter(str(number))
            now[0] += 3.0
            queue.leave(str(number))
        assert queue.seconds_per_request == pytest.approx(3.0)
        for name in "abcdef":
            queue.enter(name)
        with pytest.raises(QueueFull) as raised:
            queue.enter("g")
        assert raised.value.seconds == pytest.approx(3.0)  # two of four waiting requests run in one round of two

    in_loop(body)


def test_the_queue_is_fair_between_principals() -> None:
    def body() -> None:
        queue = Queue(max_active=2, max_waiting=100)
        queue.open()
        turns = {f"a{number}": queue.enter(f"a{number}", principal="a") for number in range(20)}
        turns |= {f"{name}0": queue.enter(f"{name}0", principal=name) for name in "bc"}
        granted = [name for name, turn in turns.items() if turn.done()]
        assert granted == ["a0", "a1"]
        for _ in range(4):
            queue.leave(granted[-2])
            granted += [name for name, turn in turns.items() if turn.done() and name not in granted]
        assert granted[2:4] == ["b0", "c0"]  # before the other requests of a
        queue.leave(granted[-1])
        assert not queue._last_turn.keys() - {"a", "b", "c"}

    in_loop(body)


def test_a_principal_without_requests_leaves_no_state() -> None:
    def body() -> None:
        queue = Queue(max_active=1, max_waiting=100)
        queue.open()
        for number in range(50):
            queue.enter(str(number), principal=f"user {number}")
        for number in range(50):
            queue.leave(str(number))
        assert (queue.active, queue.waiting, queue._last_turn) == (0, 0, {})

    in_loop(body)


def test_a_priority_orders_one_principals_requests() -> None:
    def body() -> None:
        queue = Queue(max_active=1, max_waiting=100)
        queue.open()
        queue.enter("first", principal="a")
        turns = {f"a{number}": queue.enter(f"a{number}", priority=-number, principal="a") for number in range(3)}
        turns["b"] = queue.enter("b", priority=9, principal="b")
        granted: list[str] = []
        for leaving in ("first", "b", "a2", "a1"):
            queue.leave(leaving)
            granted += [name for name, turn in turns.items() if turn.done() and name not in granted]
        assert granted == ["b", "a2", "a1", "a0"]

    in_loop(body)
