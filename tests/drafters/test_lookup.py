"""Lookup drafts continuations of repeated suffixes, and nothing without a repetition."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from outrider.drafters.interface import EMPTY, MAX_NODES, Verdict
from outrider.drafters.lookup import LookupDrafter
from outrider.drafters.options import LookupOptions
from tests.drafts import Driven
from tests.trees import check

NONE = np.empty(0, np.int32)
OPTIONS = LookupOptions()


@given(text=st.lists(st.integers(0, 4), min_size=1, max_size=80), budget=st.integers(1, MAX_NODES))
def test_drafts_are_well_formed_parts_of_the_text(text: list[int], budget: int) -> None:
    drafter = Driven(LookupDrafter(OPTIONS))
    drafter.begin(np.array(text, np.int32))
    tree = drafter.propose(budget)
    check(tree)
    assert len(tree) <= budget
    words = " ".join(map(str, text))
    for row in range(len(tree)):
        assert " ".join(map(str, tree.path(row))) in words


def test_a_repeated_phrase_is_continued() -> None:
    drafter = Driven(LookupDrafter(OPTIONS))
    phrase = list(range(10, 30))
    drafter.begin(np.array([*phrase, 1, 2], np.int32))
    assert len(drafter.propose(16)) == 0
    drafter.observe(Verdict(EMPTY, NONE, np.array(phrase[:4], np.int32)))
    tree = drafter.propose(16)
    assert tree.path(len(tree) - 1)[:10] == phrase[4:14]


def test_continuations_are_drafted_most_frequent_first() -> None:
    text = np.array([1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 4, 0, 1, 2], np.int32)
    drafter = Driven(LookupDrafter(LookupOptions()))
    drafter.begin(text)
    tree = drafter.propose(8)
    assert tree.tokens[tree.parents == -1].tolist() == [3, 4]
