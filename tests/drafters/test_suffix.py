"""The suffix index against brute force."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from drafters.suffix import MAX_MATCH, CorpusArrays, locate, sort_positions

SEPARATOR = 6
texts = st.lists(st.integers(0, 5), max_size=40)


def index(documents: list[list[int]]) -> CorpusArrays:
    tokens = np.array([t for document in documents for t in (SEPARATOR, *document)], np.uint16)
    return CorpusArrays(tokens, sort_positions(tokens), SEPARATOR)


@given(st.lists(texts, max_size=4))
def test_positions_are_sorted_by_what_stands_before_them(documents: list[list[int]]) -> None:
    corpus = index(documents)
    before = [tuple(corpus.tokens[:i][::-1][:MAX_MATCH].tolist()) for i in corpus.order]
    assert before == sorted(before)
    assert sorted(corpus.order.tolist()) == list(range(len(corpus.tokens)))


@given(st.lists(texts, max_size=4), st.lists(st.integers(0, 5), max_size=20), st.integers(1, 3))
def test_the_longest_ending_is_found_everywhere(documents: list[list[int]], context: list[int], shortest: int) -> None:
    corpus = index(documents)
    low, high, length = locate(corpus, np.array(context, np.int32), MAX_MATCH, shortest)
    text = corpus.tokens.tolist()
    places: dict[int, set[int]] = {}
    for size in range(shortest, min(MAX_MATCH, len(context)) + 1):
        found = {i for i in range(size, len(text) + 1) if text[i - size : i] == context[len(context) - size :]}
        places[size] = found - {len(text)}
    best = max((size for size, found in places.items() if found), default=0)
    assert length == best
    assert set(corpus.order[low:high].tolist()) == places.get(best, set())


def test_a_match_longer_than_the_text_before_it() -> None:
    corpus = index([[1, 2, 1, 2, 3]])
    low, high, length = locate(corpus, np.array([5, 1, 2], np.int32), MAX_MATCH, 1)
    assert length == 2
    assert sorted(int(corpus.tokens[i]) for i in corpus.order[low:high]) == [1, 3]
