"""The queue is fair, ordered and bounded, and removed requests hold no place."""

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.server.engine.fair_queue import LONG_PROMPT_TOKENS, Queue, QueueFull


class Rig:
    """An open queue, and the requests whose turn has come, in order; "-a" when the turn of "a" has ended early."""

    def __init__(self, max_active: int, max_waiting: int = 100, opened: bool = True, **options: Any) -> None:
        self.turns: list[str] = []
        pause = lambda id: self.turns.append(f"-{id}")  # noqa: E731
        self.queue = Queue(max_active, max_waiting, on_run=self.turns.append, on_pause=pause, **options)
        if opened:
            self.queue.open()

    def enter(self, names: Iterable[str], **options: Any) -> None:
        """Adds requests, each of the principal of its first letter."""
        for name in names:
            self.queue.enter(name, principal=name[0], **options)

    def new_turns(self, action: Callable[[str], object], name: str) -> list[str]:
        """The turns that an action on a request causes."""
        before = len(self.turns)
        action(name)
        return self.turns[before:]


@pytest.mark.parametrize("bound", ["max_waiting", "max_waiting_tokens"])
def test_places_in_the_queue_have_shares(bound: str) -> None:
    bounds: Any = {"max_waiting": 1000, bound: 60}
    rig = Rig(max_active=1, **bounds)

    def enter(principal: str, count: int) -> int:
        """How many of the requests are admitted."""
        admitted = 0
        for number in range(count):
            with suppress(QueueFull):
                rig.queue.enter(f"{principal} {number}", principal=principal, tokens=1)
                admitted += 1
        return admitted

    assert enter("alice", 100) == 61  # one runs, and nobody else wants the others' places
    assert enter("carol", 100) == 30
    assert enter("bob", 6) == 6
    assert enter("dave", 100) == 15
    assert all(enter(f"key {number}", 1) == 1 for number in range(20))
    assert enter("carol", 1) == 0


def test_a_closed_queue_keeps_the_requests_that_have_not_started() -> None:
    rig = Rig(max_active=1, opened=False)
    rig.enter("a")
    assert not rig.turns
    rig.queue.open()
    rig.enter("b")
    assert rig.queue.close() == ["a"]
    assert rig.new_turns(rig.queue.leave, "a") == []
    rig.queue.open()
    assert rig.turns == ["a", "b"]


@pytest.mark.parametrize(("max_active", "kept"), [(1, 10), (3, 2)])
def test_whoever_comes_back_after_each_answer_gets_no_more_turns_than_those_that_wait(max_active: int, kept: int) -> None:
    """Alice has `kept` requests at a time, and sends the next one when one has ended; the others always have some waiting."""
    rig = Rig(max_active, max_waiting=1000)
    for principal in "bcde":
        rig.enter(f"{principal}{number}" for number in range(100))
    rig.enter(f"a{number}" for number in range(kept))
    running, turns, sent = list(rig.turns), Counter[str](), kept
    while turns.total() < 200:
        name = running.pop(0)
        turns[name[0]] += 1
        running += rig.new_turns(rig.queue.leave, name)
        if name[0] == "a":
            before = len(rig.turns)
            rig.enter([f"a{sent}"])
            sent += 1
            running += rig.turns[before:]
        for paused in [each for each in running if each[0] == "-"]:
            running.remove(paused)
            running.remove(paused[1:])
    assert max(turns.values()) - min(turns.values()) <= 4, turns


def test_a_waiting_principal_gets_its_share_of_the_places() -> None:
    rig = Rig(max_active=4)
    rig.enter(["a1", "a2", "a3", "a4", "a5"])
    rig.enter(["b1"])
    assert rig.turns[4:] == ["-a4", "b1"]
    rig.enter(["b2", "b3"])
    assert rig.turns[6:] == ["-a3", "b2"]  # two each, so b3 waits
    rig.enter(["c1"])
    assert rig.turns[8] in ("-a2", "-b2") and rig.turns[9:] == ["c1"]
    assert rig.queue.active == 4
    rig.enter(["d1", "e1"])
    assert sorted(place.principal for place in rig.queue._in_state("running")) == ["a", "b", "c", "d"]


def test_a_held_request_frees_its_place() -> None:
    rig = Rig(max_active=1)
    rig.enter(["a1", "a2"])
    assert rig.new_turns(rig.queue.hold, "a1") == ["-a1", "a2"]
    assert rig.new_turns(rig.queue.hold, "a1") == []
    assert rig.new_turns(rig.queue.leave, "a2") == []
    assert rig.new_turns(rig.queue.resume, "a1") == ["a1"]
    assert rig.new_turns(rig.queue.resume, "a1") == []
    rig.queue.hold("unknown")
    rig.queue.resume("unknown")
    assert rig.new_turns(rig.queue.hold, "a1") == ["-a1"]
    assert rig.queue.close() == ["a1"]


def test_a_priority_orders_one_principals_requests() -> None:
    rig = Rig(max_active=1)
    rig.enter(["a"])
    for number in range(3):
        rig.enter([f"a{number}"], priority=-number)
    rig.enter(["b"], priority=9)
    for name in ("a", "b", "a2", "a1"):
        rig.queue.leave(name)
    assert rig.turns == ["a", "b", "a2", "a1", "a0"]


LONG = LONG_PROMPT_TOKENS + 1


def test_a_long_prompt_takes_a_place_when_its_answer_begins() -> None:
    rig = Rig(max_active=2, opened=False)
    rig.queue.open(slots=5)
    rig.enter(["a1", "a2", "a3"], tokens=LONG)
    rig.enter(["a4", "a5"], tokens=LONG)
    assert rig.turns == ["a1", "a2", "a3", "a4"]  # the last KV cache is for a short prompt
    rig.enter(["a6", "a7"], tokens=LONG_PROMPT_TOKENS)
    assert rig.turns[4:] == ["a6"]  # all KV caches are in use
    assert rig.new_turns(rig.queue.leave, "a6") == ["a7"]
    assert rig.new_turns(rig.queue.answer, "a1") == []
    rig.enter(["a8"])
    assert rig.new_turns(rig.queue.leave, "a3") == []  # two answer
    assert rig.new_turns(rig.queue.leave, "a7") == ["a5", "a8"]
    rig.queue.answer("unknown")


@given(st.integers(1, 4), st.integers(1, 6), st.lists(st.tuples(st.sampled_from("ealh"), st.integers(0, 30)), max_size=60))
def test_whoever_may_run_runs(max_active: int, slots: int, steps: list[tuple[str, int]]) -> None:
    """After any events: no place is free that a waiting request could have, and there are never more than KV caches."""
    rig = Rig(max_active, max_waiting=1000, opened=False)
    rig.queue.open(slots=slots)
    queue, numbers, most = rig.queue, iter(range(1000)), max(max_active, slots)
    for action, number in steps:
        names = list(queue._places)
        if action == "e" or not names:
            rig.enter([f"{'abc'[number % 3]}{next(numbers)}"], tokens=LONG if number % 2 else 1)
            continue
        name = names[number % len(names)]
        if action == "a" and queue._places[name].state == "running":
            queue.answer(name)
        elif action == "l":
            queue.leave(name)
        elif action == "h":
            queue.hold(name)
            queue.resume(name)
        running, waiting = queue._in_state("running"), queue._in_state("waiting")
        reads = [place for place in running if place.reads]
        assert len(running) <= most
        if len(running) - len(reads) < max_active and len(running) < most and waiting:
            assert len(running) == most - 1  # the last KV cache is for others than those whose long prompts are read
            assert all(each.reads and each.principal in {place.principal for place in reads} for each in waiting)


def test_requests_of_one_session_take_one_place() -> None:
    """They would wait for each other in the worker, in places that others need."""
    rig = Rig(max_active=2)
    rig.enter(["a1", "a2", "a3"], session="s")
    rig.enter(["a4"])
    rig.enter(["b1"], session="s")  # another principal's session
    assert rig.turns == ["a1", "a4", "-a4", "b1"]
    assert rig.new_turns(rig.queue.leave, "b1") == ["a4"]
    assert rig.new_turns(rig.queue.hold, "a1") == ["-a1"]  # it still has the session
    assert rig.new_turns(rig.queue.resume, "a1") == ["a1"]
    assert rig.new_turns(rig.queue.leave, "a1") == ["a2"]
    assert rig.new_turns(rig.queue.leave, "a2") == ["a3"]
