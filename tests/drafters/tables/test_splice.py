"""A spliced suffix array orders the text as a new one does."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from outrider.drafters.tables.splice import splice
from outrider.drafters.tables.suffix import MAX_MATCH, sort_suffixes

Documents = list[list[int]]
documents = st.lists(st.lists(st.integers(0, 2), max_size=30), max_size=6)


def flat(texts: Documents, separator: int, dtype: Any = np.uint16) -> NDArray[Any]:
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
    tokens = flat(old, separator)
    kept = np.repeat(np.array(keep[: len(old)], bool), [len(text) + 1 for text in old])
    text, order = splice(tokens, sort_suffixes(tokens), kept, flat(new, separator, np.uint32), separator)
    assert text.tolist() == flat([text for text, stays in zip(old, keep, strict=False) if stays] + new, separator).tolist()
    assert sorted(order.tolist()) == list(range(len(text)))
    found = endings(text, order, separator)
    assert found == sorted(found)
    assert order.dtype == np.uint32
