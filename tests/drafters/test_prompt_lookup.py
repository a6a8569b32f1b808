"""Prompt lookup drafts what followed the last occurrence of the longest repeated ending, and compiles nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.drafters.interface import Source
from outrider.drafters.prompt_lookup import LONGEST, PromptLookupDrafter, last_match
from outrider.drafters.registry import make_uncompiled
from outrider.drafters.sequence import Sequence
from tests.trees import check


def drafted(text: list[int], budget: int = 8) -> list[int]:
    drafter = PromptLookupDrafter()
    drafter.begin(Sequence(np.array(text, np.int32)))
    tree = drafter.propose(budget)
    check(tree)
    assert set(tree.source.tolist()) <= {Source.LOOKUP}
    tokens: list[int] = tree.tokens.tolist()
    return tokens


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ([], []),
        ([1], []),
        ([1, 2, 3], []),
        ([5, 5], []),  # one token is no match
        ([1, 2, 3, 4, 1, 2], [3, 4, 1, 2]),
        ([1, 2, 8, 7, 1, 2, 9, 7, 1, 2], [9, 7, 1, 2]),  # the last of equal matches
        ([1, 2, 3, 8, 5, 2, 3, 9, 1, 2, 3], [8, 5, 2, 3, 9, 1, 2, 3]),  # a longer match counts more
    ],
)
def test_what_followed_the_longest_match_is_drafted(text: list[int], expected: list[int]) -> None:
    assert drafted(text) == expected
    assert drafted(text, 2) == expected[:2]
    assert drafted(text, 0) == []


@given(st.lists(st.integers(0, 3), max_size=60))
def test_the_match_is_the_longest_one(text: list[int]) -> None:
    end, length = last_match(np.array(text, np.int32))
    matches = [
        (size, at)
        for size in range(1, min(LONGEST, len(text) - 1) + 1)
        for at in range(size, len(text))
        if text[at - size : at] == text[-size:]
    ]
    assert (length, end) == max(matches, default=(0, 0))


def test_a_prediction_is_drafted_first() -> None:
    """The drafter that a request has without the compiled library."""
    expected = np.array([7, 8, 9], np.int32)
    for has_prediction, tokens in ((True, [7, 8, 9]), (False, [2, 2, 1])):
        drafter = make_uncompiled(has_prediction)
        drafter.begin(Sequence(np.array([2, 1, 2, 2, 1], np.int32)), expected)
        assert drafter.propose(3).tokens.tolist() == tokens
