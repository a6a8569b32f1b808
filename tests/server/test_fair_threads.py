"""The pool gives every principal its turn and never all threads to one; and shares of a bounded resource."""

import asyncio
import threading
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from outrider.server.fair_shares import Ledger, NoRoom
from outrider.server.fair_threads import FairThreads


class Rig:
    """A pool of two resources, and work that waits for `release`."""

    def __init__(self) -> None:
        self.release = threading.Event()
        self.started: list[str] = []
        self.ended: list[str] = []
        self.used: set[str] = set()
        self.pool = FairThreads(["first", "second"], "test")

    def submit(self, principal: str, name: str) -> asyncio.Future[str]:
        """Work that blocks its thread."""

        def work(resource: str) -> str:
            self.started.append(name)
            self.used.add(resource)
            assert self.release.wait(10)
            self.ended.append(name)
            return name

        return asyncio.ensure_future(self.pool.run(principal, work))

    async def until_started(self, count: int) -> None:
        async with asyncio.timeout(10):
            while len(self.started) < count:
                await asyncio.sleep(0.001)


async def test_one_principal_cannot_hold_all_threads() -> None:
    rig = Rig()
    greedy = [rig.submit("greedy", f"greedy {number}") for number in range(4)]
    await rig.until_started(1)
    await asyncio.sleep(0.02)
    assert rig.started == ["greedy 0"]  # one thread, however much it asks for
    other = rig.submit("other", "other")
    await rig.until_started(2)
    assert rig.started == ["greedy 0", "other"]
    rig.release.set()
    assert await asyncio.gather(*greedy, other) == [*(f"greedy {number}" for number in range(4)), "other"]
    assert rig.used == {"first", "second"}


async def test_principals_take_turns() -> None:
    rig = Rig()
    work = [rig.submit("a", "a0"), rig.submit("b", "b0")]
    await rig.until_started(2)
    work += [rig.submit("a", f"a{number}") for number in (1, 2, 3)]
    await asyncio.sleep(0)
    work += [rig.submit("c", "c0"), rig.submit("d", "d0")]
    await asyncio.sleep(0)
    rig.release.set()
    await asyncio.gather(*work)
    assert max(rig.started.index("c0"), rig.started.index("d0")) < rig.started.index("a2")


async def test_work_whose_caller_left_is_not_started() -> None:
    rig = Rig()
    first = rig.submit("a", "first")
    await rig.until_started(1)
    left, last = rig.submit("a", "left"), rig.submit("a", "last")
    await asyncio.sleep(0)
    left.cancel()
    first.cancel()  # its work runs, but its result is dropped
    rig.release.set()
    assert await last == "last"
    assert rig.started == ["first", "last"]
    assert not rig.pool._waiting and not rig.pool._running


BOUND = 20


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, BOUND)), max_size=40))
def test_who_holds_nothing_is_admitted_and_nobody_takes_more_than_a_share_above_the_bound(taken: list[tuple[str, int]]) -> None:
    ledger, held = Ledger(BOUND), Counter[str]()
    for principal, amount in taken:
        total = sum(held.values())
        fits = total + amount <= BOUND
        is_share = held[principal] + amount <= BOUND // max(1, sum(each > 0 for each in held.values()))
        try:
            ledger.take(principal, amount)
        except NoRoom:
            assert held[principal] and not fits and not is_share
        else:
            assert fits or not held[principal] or is_share
            held[principal] += amount
    for principal, amount in held.items():
        ledger.release(principal, amount)
    ledger.take("d", 1)
    ledger.take("d", BOUND - 1)  # everything was given back
