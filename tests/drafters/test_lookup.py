"""Lookup drafts continuations of repeated suffixes, and nothing without a repetition."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from outrider.drafters.interface import MAX_NODES
from outrider.drafters.lookup import LookupDrafter
from outrider.drafters.options import LookupOptions
from tests.drafts import Driven
from tests.trees import check

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


def test_continuations_are_drafted_most_frequent_first() -> None:
    text = np.array([1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 4, 0, 1, 2], np.int32)
    drafter = Driven(LookupDrafter(LookupOptions()))
    drafter.begin(text)
    tree = drafter.propose(8)
    assert tree.tokens[tree.parents == -1].tolist() == [3, 4]
