"""Which parts of requests are encoded together."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from outrider.server.encoders.turns import PART, TOGETHER, Part, Turns, size

REQUESTS = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, PART), st.sampled_from([None, 1]), st.booleans()))


@given(REQUESTS)
def test_each_part_is_taken_once_in_the_order_of_its_principal(requests: Sequence[tuple[str, int, int | None, bool]]) -> None:
    async def check() -> None:
        turns = Turns()
        added: dict[str, list[Part]] = {}
        for principal, count, options, has_left in requests:
            part = Part(["text"] * count, options)
            turns.add(principal, part)
            if has_left:
                part.answer.cancel()
            else:
                added.setdefault(principal, []).append(part)
        taken: list[Part] = []
        while parts := turns.take():
            assert len({part.options for part in parts}) == 1 and size(parts) <= TOGETHER
            taken += parts
        for principal, parts in added.items():
            assert [part for part in taken if part in parts] == parts, principal
        assert len(taken) == sum(map(len, added.values())) and not turns

    asyncio.run(check())


def test_a_principal_with_many_texts_does_not_delay_another() -> None:
    async def check() -> None:
        turns = Turns()
        for _ in range(100):
            turns.add("many", Part(["text"] * PART, None))
        turns.take()
        one = Part(["text"], None)
        turns.add("one", one)
        assert one in turns.take()

    asyncio.run(check())


def test_parts_with_other_options_wait() -> None:
    async def check() -> None:
        turns = Turns()
        parts = [Part(["text"], options) for options in (1, 2, 1)]
        for principal, part in zip("abc", parts, strict=True):
            turns.add(principal, part)
        assert turns.take() == [parts[0], parts[2]]
        assert turns.take() == [parts[1]]

    asyncio.run(check())
