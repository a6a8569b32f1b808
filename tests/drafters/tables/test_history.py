"""Successors in the session's text equal brute force."""

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from drafters.tables.history import MAX_OCCURRENCES, MAX_RECENT, append, extend_hashes, followers, new_history
from drafters.tables.suffix import LONGEST_CONTEXT


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


def test_memory_does_not_grow() -> None:
    history = new_history(64)
    size = sum(array.nbytes for array in history)
    hashes = np.zeros(LONGEST_CONTEXT + 1, np.uint64)
    for token in range(10_000):
        append(history, hashes, token % 50)
        extend_hashes(hashes, token % 50, hashes)
    assert sum(array.nbytes for array in history) == size
