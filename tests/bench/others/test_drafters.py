"""The drafts of other programs are trees of what their own code proposes."""

from __future__ import annotations

import numpy as np
import pytest

from bench.others.drafters import SuffixCache, TokenRecycling, suffix_cache, transformers_lookup, tree_of
from bench.recordings import Line
from bench.replay import Tally, replay
from outrider.drafters.interface import Ints, Verdict
from outrider.drafters.sequence import Sequence
from tests.trees import check

PERIOD: Ints = np.arange(10, dtype=np.int32)


def test_a_lookup_drafts_what_followed_the_last_tokens() -> None:
    drafter = transformers_lookup()
    drafter.begin(Sequence(np.array([5, 6, 7, 8, 9, 5, 6], np.int32)))
    assert drafter.propose(64).tokens.tolist() == [7, 8, 9, 5, 6]
    assert drafter.propose(2).tokens.tolist() == [7, 8]
    drafter.begin(Sequence(PERIOD))
    assert len(drafter.propose(64)) == 0


def test_a_repeated_text_is_drafted_ten_tokens_at_a_time() -> None:
    tally = Tally()
    replay(transformers_lookup(), Line(np.tile(PERIOD, 2), np.tile(PERIOD, 4)), 64, tally)
    assert tally.steps == 1 + 4  # the first token has no draft


def test_recycled_tokens_are_drafted_by_their_ranks() -> None:
    """The target's likeliest tokens after 5 are 6 and 7, after 6 they are 8 and 5; those of 7 and 8 are not known."""
    text, drafter = Sequence(np.array([5], np.int32)), TokenRecycling()
    drafter.begin(text)
    assert len(drafter.propose(8)) == 0
    tree, likeliest = tree_of([6], [-1], [0.5]), np.array([[6, 7], [8, 5]], np.int32)
    text.append(np.array([6, 5], np.int32))
    drafter.observe(
        Verdict(tree, np.array([0], np.int32), np.array([6, 5], np.int32), likeliest, np.full((2, 2), 0.1, np.float32))
    )
    found = drafter.propose(5)
    check(found)
    paths = [found.path(row) for row in range(len(found))]
    assert sorted(paths) == sorted([[6], [6, 8], [7], [6, 5], [6, 5, 6]])


def test_nodes_keep_their_parents() -> None:
    tree = tree_of([4, 5, 6], [-1, 0, -1], [0.6, 0.5, 0.4])
    check(tree)
    assert [tree.path(row) for row in range(3)] == [[4], [4, 5], [6]]
    assert len(tree_of([], [], [])) == 0


def test_a_suffix_cache_drafts_from_the_text_and_from_earlier_responses() -> None:
    pytest.importorskip("arctic_inference")
    text = Sequence(np.array([1, 2, 3], np.int32))
    drafter = SuffixCache(suffix_cache([np.array([2, 3, 7, 8], np.int32)]), 8.0, as_tree=True)
    for _ in range(2):  # it keeps nothing of an answer
        drafter.begin(text)
        tree = drafter.propose(8)
        check(tree)
        assert tree.path(len(tree) - 1) == [7, 8]
        drafter.end()
    alone = SuffixCache(suffix_cache([]), 8.0, as_tree=False)
    alone.begin(text)
    assert len(alone.propose(8)) == 0
