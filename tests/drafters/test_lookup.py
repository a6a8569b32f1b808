"""Lookup copies what the session's text said before, and nothing where nothing repeats."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafters.interface import EMPTY, Verdict
from drafters.lookup import LookupDrafter, find_ngram
from drafters.options import LookupOptions

NONE = np.empty(0, np.int32)
ALL = [
    LookupOptions(match="ngram"),
    LookupOptions(continuation="tree"),
    LookupOptions(continuation="recent"),
    LookupOptions(continuation="frequent"),
]


@pytest.mark.parametrize("options", ALL)
@given(text=st.lists(st.integers(0, 4), min_size=1, max_size=80), budget=st.integers(1, 64))
def test_drafts_are_well_formed_and_stand_in_the_text(options: LookupOptions, text: list[int], budget: int) -> None:
    drafter = LookupDrafter(options)
    drafter.begin(np.array(text, np.int32))
    tree = drafter.propose(budget)
    tree.check()
    assert len(tree) <= budget
    words = " ".join(map(str, text))
    for row in range(len(tree)):
        assert " ".join(map(str, tree.path(row))) in words


@pytest.mark.parametrize("options", ALL)
def test_a_repeated_phrase_is_copied_on(options: LookupOptions) -> None:
    drafter = LookupDrafter(options)
    phrase = list(range(10, 30))
    drafter.begin(np.array([*phrase, 1, 2], np.int32))
    assert len(drafter.propose(16)) == 0
    drafter.observe(Verdict(EMPTY, NONE, np.array(phrase[:4], np.int32)))
    tree = drafter.propose(16)
    assert tree.path(len(tree) - 1)[:10] == phrase[4:14]


def test_recent_and_frequent_differ_where_they_should() -> None:
    text = np.array([1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 4, 0, 1, 2], np.int32)
    first = {}
    for continuation in ("recent", "frequent"):
        drafter = LookupDrafter(LookupOptions(continuation=continuation))
        drafter.begin(text)
        first[continuation] = drafter.propose(8).tokens[0]
    assert first == {"recent": 4, "frequent": 3}
    drafter = LookupDrafter(LookupOptions())
    drafter.begin(text)
    tree = drafter.propose(8)
    assert tree.tokens[tree.parents == -1].tolist() == [3, 4]


def test_prompt_lookup_takes_the_latest_longest() -> None:
    assert find_ngram(np.array([1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 3], np.int32), 3) == 7
    assert find_ngram(np.array([5, 3, 1, 2, 3], np.int32), 3) == 2
    assert find_ngram(np.array([1, 2, 3], np.int32), 3) == -1
    assert find_ngram(np.array([], np.int32), 3) == -1
