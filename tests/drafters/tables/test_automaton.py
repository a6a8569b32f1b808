"""The suffix automaton equals brute force."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from outrider.drafters.tables.automaton import HOPS, STATES, TOKENS, append, new_automaton, repeated_suffix

texts = st.lists(st.integers(0, 3), max_size=60)


def longest_repeated_suffix(text: list[int]) -> tuple[int, set[int]]:
    """Its length, and the positions after its earlier occurrences."""
    for length in range(len(text) - 1, 0, -1):
        suffix = text[len(text) - length :]
        positions = {i for i in range(length, len(text)) if text[i - length : i] == suffix}
        if positions:
            return length, positions
    return 0, set()


@given(texts, st.integers(1, 10))
def test_the_longest_repeated_suffix_and_its_latest_occurrence(text: list[int], size: int) -> None:
    automaton = new_automaton(64)
    for start in range(0, len(text), size):
        append(automaton, np.array(text[start : start + size], np.int32))
    state = repeated_suffix(automaton)
    length, positions = longest_repeated_suffix(text)
    assert automaton.lengths[state] == length
    if length and len(text) < HOPS:
        assert automaton.recent[state] == max(positions)
        assert automaton.counts[state] == len(positions)


def test_a_full_automaton_is_rebuilt_from_its_newest_half() -> None:
    automaton = new_automaton(100)
    size = sum(array.nbytes for array in automaton)
    phrase = np.arange(30, dtype=np.int32)
    for _ in range(50):
        append(automaton, phrase)
    append(automaton, phrase[:7])
    assert automaton.size[TOKENS] <= 100
    assert automaton.size[STATES] <= len(automaton.lengths)
    assert automaton.lengths[repeated_suffix(automaton)] >= 7
    assert sum(array.nbytes for array in automaton) == size
