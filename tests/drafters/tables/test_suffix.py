"""The suffix index and the suffix automaton equal brute force; a spliced suffix array orders the text as a new one does."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from outrider.drafters.lookup import TOKENS, append, new_automaton, repeated_suffix
from outrider.drafters.tables import suffix
from outrider.drafters.tables.splice import splice
from outrider.drafters.tables.suffix import MAX_MATCH, sort_suffixes
from tests.drafters.tables.internals import HOPS, STATES, follow, frequent_row, narrow, position_at, word

SEPARATOR = 6
texts = st.lists(st.integers(0, 5), max_size=40)


def flat(documents: list[list[int]]) -> list[int]:
    return [t for document in documents for t in (SEPARATOR, *document)]


@given(st.lists(texts, max_size=4), st.lists(st.integers(0, 7), max_size=20))
def test_every_occurrence_of_every_suffix_of_a_context_is_found(documents: list[list[int]], context: list[int]) -> None:
    corpus = suffix.index(np.array(flat(documents), np.int64), SEPARATOR)
    low, high = np.zeros((2, MAX_MATCH + 1), np.int64)
    for token in context:
        follow(corpus, low, high, token, low, high)
    text = flat(documents)
    for size in range(1, min(MAX_MATCH, len(context)) + 1):
        ending = context[len(context) - size :]
        expected = {i for i in range(len(text)) if text[i : i + size] == ending and SEPARATOR not in ending}
        assert {position_at(corpus, entry) for entry in range(low[size], high[size])} == expected


@pytest.mark.parametrize(("seed", "kinds"), [(0, 3), (1, 3), (2, 3), (3, 30)])
def test_frequent_contexts_are_counted(seed: int, kinds: int) -> None:
    text = np.random.default_rng(seed).integers(0, kinds, 3000).tolist()
    documents = [text[i : i + 500] for i in range(0, 3000, 500)]
    separator = 40
    whole = [t for document in documents for t in (separator, *document)]
    corpus = suffix.index(np.array(whole, np.int64), separator)
    checked = 0
    for length in range(suffix.LONGEST_CONTEXT + 1):
        for start in range(0, 400, 37):
            context = text[start : start + length]
            low, high = 0, corpus.size
            for i, token in enumerate(context):
                low, high = narrow(corpus, low, high, i, token)
            if high - low <= suffix.DENSE:
                continue
            checked += 1
            at = corpus.rows + frequent_row(corpus, low, length) * suffix.ROW
            row = [word(corpus.pages, at + i) for i in range(suffix.ROW)]
            followers = (whole[i + length] for i in range(len(whole) - length) if whole[i : i + length] == context)
            expected = Counter(t for t in followers if t != separator)
            entries = list(zip(*(iter(row[suffix.SUCCESSORS :]),) * 3, strict=True))[: min(suffix.WIDTH, row[suffix.DISTINCT])]
            assert (
                sorted((count for _, count, _ in entries), reverse=True)
                == sorted(expected.values(), reverse=True)[: suffix.WIDTH]
            )
            assert all(expected[token] == count for token, count, _ in entries)
            assert row[suffix.TOTAL] == expected.total()
            assert row[suffix.DISTINCT] == len(expected)
            for token in range(kinds):  # in the row or not
                found = narrow(corpus, low, high, length, token)
                positions = {position_at(corpus, entry) for entry in range(*found)}
                assert positions == {i for i in range(len(whole)) if whole[i : i + length + 1] == [*context, token]}
    assert checked > 10


Documents = list[list[int]]
documents = st.lists(st.lists(st.integers(0, 2), max_size=30), max_size=6)


def joined(texts: Documents, separator: int, dtype: Any = np.uint16) -> NDArray[Any]:
    return np.array([token for text in texts for token in (*text, separator)], dtype)


def endings(text: NDArray[Any], order: NDArray[Any], separator: int) -> list[list[int]]:
    """Up to MAX_MATCH tokens after each position in `order`, within the document."""
    found = [text[position : position + MAX_MATCH].tolist() for position in order]
    return [ending[: ending.index(separator) + 1] if separator in ending else ending for ending in found]


@given(
    documents, st.lists(st.booleans(), min_size=6, max_size=6), st.lists(st.lists(st.integers(0, 2), max_size=3), max_size=3)
)
def test_documents_are_deleted_and_added(old: Documents, keep: list[bool], new: Documents) -> None:
    separator = 3
    tokens = joined(old, separator)
    kept = np.repeat(np.array(keep[: len(old)], bool), [len(text) + 1 for text in old])
    text, order = splice(tokens, sort_suffixes(tokens), kept, joined(new, separator, np.uint32), separator)
    assert text.tolist() == joined([text for text, stays in zip(old, keep, strict=False) if stays] + new, separator).tolist()
    assert sorted(order.tolist()) == list(range(len(text)))
    found = endings(text, order, separator)
    assert found == sorted(found)
    assert order.dtype == np.uint32


short_texts = st.lists(st.integers(0, 3), max_size=60)


def longest_repeated_suffix(text: list[int]) -> tuple[int, set[int]]:
    """Its length, and the positions after its earlier occurrences."""
    for length in range(len(text) - 1, 0, -1):
        suffix = text[len(text) - length :]
        positions = {i for i in range(length, len(text)) if text[i - length : i] == suffix}
        if positions:
            return length, positions
    return 0, set()


@given(short_texts, st.integers(1, 10))
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
