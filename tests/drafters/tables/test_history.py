"""Successors in the session's text equal brute force; copies go on after changes."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.drafters.tables.history import (
    COPY_STATE,
    MAX_GAP,
    MAX_OCCURRENCES,
    MAX_RECENT,
    POSITION,
    append,
    extend_hashes,
    find_copy,
    follow_copy,
    followers,
    new_history,
)
from outrider.drafters.tables.suffix import LONGEST_CONTEXT

SPAN = list(range(100, 160))


def copy_after(text: list[int], capacity: int = 512) -> list[int]:
    """The state of the copy at the end of a text."""
    history = new_history(capacity)
    hashes = np.zeros(LONGEST_CONTEXT + 1, np.uint64)
    copy = np.full(COPY_STATE, -1, np.int64)
    for previous, token in zip([-1, *text], text, strict=False):
        append(history, hashes, token)
        extend_hashes(hashes, token, hashes)
        follow_copy(history, copy, previous, token, copy, True)
        find_copy(history, hashes[LONGEST_CONTEXT], copy)
    state: list[int] = copy.tolist()
    return state


@pytest.mark.parametrize(
    ("answer", "position"),
    [
        (SPAN[:20], 20),
        ([*SPAN[:20], 7], 21),  # a token replaced
        ([*SPAN[:20], 7, SPAN[20]], 21),  # a token inserted
        ([*SPAN[:20], *SPAN[23:24]], 24),  # three tokens left out
        ([*SPAN[:20], 7, 8, 9, SPAN[23]], 24),  # three tokens replaced
        ([*SPAN[:20], *range(7, 7 + MAX_GAP)], 20 + MAX_GAP),
    ],
)
def test_a_copy_goes_on_after_a_change(answer: list[int], position: int) -> None:
    assert copy_after([*SPAN, 1, 2, *answer])[POSITION] == position


def test_a_copy_ends_after_many_changes_and_where_its_span_ends() -> None:
    assert copy_after([*SPAN, 1, 2, *SPAN[:20], *range(7, 8 + MAX_GAP)])[POSITION] == -1
    assert copy_after([*SPAN, *SPAN[:5]])[POSITION] == -1  # too short
    assert copy_after([*SPAN[:20], *range(300, 800), *SPAN[:20]], 512)[POSITION] == -1  # overwritten


@given(st.lists(st.integers(0, 3), max_size=200), st.sampled_from([16, 256]))
def test_followers_are_those_of_the_latest_occurrences(text: list[int], capacity: int) -> None:
    history = new_history(capacity)
    hashes = np.zeros(LONGEST_CONTEXT + 1, np.uint64)
    for token in text:
        append(history, hashes, token)
        extend_hashes(hashes, token, hashes)
    tokens, counts = np.zeros(256, np.int64), np.zeros(256)
    for length in range(min(LONGEST_CONTEXT, len(text)) + 1):
        context = text[len(text) - length :]
        first = max(length, len(text) - capacity)
        positions = [i for i in range(first, len(text)) if text[i - length : i] == context]
        positions = positions[-(MAX_OCCURRENCES if length else MAX_RECENT) :]
        end, total = followers(history, length, hashes[length], tokens, counts, 0)
        assert total == len(positions)
        found = dict(zip(tokens[:end].tolist(), counts[:end].tolist(), strict=True))
        assert found == dict(Counter(text[i] for i in positions))
