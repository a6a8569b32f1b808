"""A chunk is shared so that short prompts go first and none starves."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outrider.verify.reading import OLDEST_SHARE, divide

Prompts = list[list[int]]
goals = st.lists(st.integers(1, 600), min_size=1, max_size=3)
chunks = st.integers(0, 512)


def test_the_shortest_goes_first_and_the_oldest_gets_its_share() -> None:
    assert divide(100, [[8000]]) == [100]
    assert divide(100, [[8000], [2]]) == [98, 2]
    assert divide(100, [[8000], [500], [60], [40]]) == [25, 0, 35, 40]
    assert divide(8, [[8000], [500], [300]]) == [2, 0, 6]
    assert divide(100, []) == []


def test_a_beginning_that_others_wait_for_is_as_urgent_as_theirs() -> None:
    assert divide(100, [[9000], [8000, 40], [50]]) == [25, 40, 35]


@given(chunks, st.lists(goals, max_size=8))
def test_properties_of_the_order(tokens: int, prompts: Prompts) -> None:
    given_ = divide(tokens, prompts)
    left = [max(each) for each in prompts]
    assert sum(given_) == min(tokens, sum(left))
    assert all(0 <= share <= most for share, most in zip(given_, left, strict=True))
    if prompts:
        assert given_[0] >= min(left[0], tokens / OLDEST_SHARE)
    for number, share in enumerate(given_[1:], start=1):  # whoever gets less than a goal is behind whatever others get
        missed = min((goal for goal in prompts[number] if goal > share), default=None)
        for other, theirs in enumerate(given_[1:], start=1):
            if missed is not None and other != number and theirs:
                reached = min(goal for goal in prompts[other] if goal >= theirs)
                assert (reached, other) <= (missed, number)


@given(st.integers(1, 64), st.lists(st.integers(1, 300), min_size=1, max_size=6), st.data())
def test_every_prompt_ends_however_many_come(tokens: int, first: list[int], data: st.DataObject) -> None:
    """Whatever arrives later, the prompts that are there are read after OLDEST_SHARE chunks for each chunk of theirs."""
    waiting = [[number, left] for number, left in enumerate(first)]
    rounds = sum(-(-left // -(-tokens // OLDEST_SHARE)) for left in first)
    for number in range(rounds):
        shares = divide(tokens, [[left] for _, left in waiting])
        waiting = [[key, left - share] for (key, left), share in zip(waiting, shares, strict=True) if left > share]
        waiting += [[len(first) + number, left] for left in data.draw(st.lists(st.integers(1, 300), max_size=3))]
    assert all(key >= len(first) for key, _ in waiting)
