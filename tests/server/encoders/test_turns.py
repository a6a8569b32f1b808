"""Which parts of requests are encoded together."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from outrider.server.encoders.turns import CHARACTERS, PART_CHARACTERS, PART_TEXTS, TEXTS, Part, Turns, characters, divide

REQUESTS = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, PART_TEXTS), st.sampled_from([None, 1]), st.booleans()))


@given(REQUESTS)
async def test_each_part_is_taken_once_in_the_order_of_its_principal(
    requests: Sequence[tuple[str, int, int | None, bool]],
) -> None:
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
        assert len({part.options for part in parts}) == 1 and sum(len(part.texts) for part in parts) <= TEXTS
        taken += parts
    for principal, parts in added.items():
        assert [part for part in taken if part in parts] == parts, principal
    assert len(taken) == sum(map(len, added.values()))


@given(st.lists(st.sampled_from(["a", "b" * 100, "c" * (PART_CHARACTERS // 2), "d" * (CHARACTERS + 1)]), max_size=40))
async def test_parts_are_bounded_in_texts_and_characters(texts: Sequence[str]) -> None:
    turns, parts = Turns(), divide(texts, None)
    assert [text for part in parts for text in part.texts] == list(texts)
    for part in parts:
        assert len(part.texts) <= PART_TEXTS and (len(part.texts) == 1 or characters(part.texts) <= PART_CHARACTERS)
        turns.add("a", part)
    while taken := turns.take():
        assert len(taken) == 1 or sum(characters(part.texts) for part in taken) <= CHARACTERS


async def test_a_principal_with_many_texts_does_not_delay_another() -> None:
    turns = Turns()
    for part in divide(["text"] * 1000, None):
        turns.add("many", part)
    turns.take()
    one = Part(["text"], None)
    turns.add("one", one)
    assert one in turns.take()
