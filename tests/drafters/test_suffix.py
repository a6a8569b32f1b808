"""The suffix index against brute force."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafters import suffix
from drafters.suffix import LONGEST_CONTEXT, MAX_MATCH, Corpus, frequent_row, index, locate, narrow

SEPARATOR = 6
texts = st.lists(st.integers(0, 5), max_size=40)


def build(documents: list[list[int]]) -> Corpus:
    return index(np.array([t for document in documents for t in (SEPARATOR, *document)], np.int64), SEPARATOR)


@given(st.lists(texts, max_size=4))
def test_positions_are_sorted_by_what_follows(documents: list[list[int]]) -> None:
    corpus = build(documents)
    after = [tuple(corpus.tokens[i : i + MAX_MATCH].tolist()) for i in corpus.order]
    assert after == sorted(after)
    assert sorted(corpus.order.tolist()) == list(range(len(corpus.tokens)))


@given(st.lists(texts, max_size=4), st.lists(st.integers(0, 5), max_size=20), st.integers(1, 3))
def test_the_longest_ending_is_found_everywhere(documents: list[list[int]], context: list[int], shortest: int) -> None:
    corpus = build(documents)
    low, high, length = locate(corpus, np.array(context, np.int32), MAX_MATCH, shortest)
    text = corpus.tokens.tolist()
    places: dict[int, set[int]] = {}
    for size in range(shortest, min(MAX_MATCH, len(context)) + 1):
        places[size] = {i for i in range(len(text)) if text[i : i + size] == context[len(context) - size :]}
    best = max((size for size, found in places.items() if found), default=0)
    assert length == best
    assert set(corpus.order[low:high].tolist()) == places.get(best, set())


@pytest.mark.parametrize("seed", range(3))
def test_frequent_contexts_are_counted(seed: int) -> None:
    text = np.random.default_rng(seed).integers(0, 3, 3000).tolist()
    documents = [text[i : i + 500] for i in range(0, 3000, 500)]
    corpus = build(documents)
    whole = corpus.tokens.tolist()
    seen = 0
    for length in range(LONGEST_CONTEXT + 1):
        for start in range(0, 400, 37):
            context = text[start : start + length]
            low, high = 0, len(corpus.order)
            for i, token in enumerate(context):
                low, high = narrow(corpus, low, high, i, token)
            if high - low <= suffix.DENSE:
                continue
            seen += 1
            row = frequent_row(corpus, low, length)
            followers = (whole[i + length] for i in range(len(whole) - length) if whole[i : i + length] == context)
            expected = Counter(t for t in followers if t != SEPARATOR)
            got = {int(t): int(c) for t, c in zip(corpus.successors[row], corpus.counts[row], strict=True) if t >= 0}
            assert got == dict(expected)
            assert corpus.totals[row] == expected.total()
            assert corpus.kinds[row] == len(expected)
    assert seen > 20
