"""ADED as a drafter: it learns within a session, only there, and it can be told not to."""

import numpy as np
import pytest

from drafters.interface import EMPTY, Verdict
from drafters.options import TrigramOptions
from drafters.tables import ngram
from drafters.trigram import TrigramDrafter
from tests.drafts import Driven
from tests.trees import check

NONE = np.empty(0, np.int32)
PHRASE = np.array([11, 12, 13, 14, 15], np.int32)


@pytest.fixture(params=["mcts", "best-first"])
def options(request: pytest.FixtureRequest) -> TrigramOptions:
    return TrigramOptions(search=request.param)


def test_it_drafts_what_the_prompt_repeats(options: TrigramOptions) -> None:
    drafter = Driven(TrigramDrafter(ngram.empty_base(), options))
    drafter.begin(np.concatenate([PHRASE, [1], PHRASE[:2]]).astype(np.int32))
    tree = drafter.propose(16)
    check(tree)
    assert [13, 14, 15] in [tree.path(row) for row in range(len(tree))]


def test_it_learns_from_what_the_target_emits(options: TrigramOptions) -> None:
    drafter = Driven(TrigramDrafter(ngram.empty_base(), options))
    drafter.begin(np.array([1], np.int32))
    assert len(drafter.propose(16)) == 0
    drafter.observe(Verdict(EMPTY, NONE, PHRASE))
    drafter.observe(Verdict(EMPTY, NONE, PHRASE[:2]))
    tree = drafter.propose(16)
    assert tree.tokens[0] == 13


def test_knowledge_lives_on_in_the_session_and_only_there(options: TrigramOptions) -> None:
    base = ngram.empty_base()
    mine, yours = Driven(TrigramDrafter(base, options)), Driven(TrigramDrafter(base, options))
    mine.begin(PHRASE)
    mine.end()
    for drafter, expected in ((mine, [13]), (yours, [])):
        drafter.begin(PHRASE[:2])
        assert drafter.propose(16).tokens[:1].tolist() == expected


def test_not_adaptive_means_the_base_table_alone() -> None:
    drafter = Driven(TrigramDrafter(ngram.empty_base(), TrigramOptions(adaptive=False)))
    drafter.begin(np.concatenate([PHRASE, PHRASE]))
    assert len(drafter.propose(16)) == 0


def test_no_budget_no_draft(options: TrigramOptions) -> None:
    drafter = Driven(TrigramDrafter(ngram.empty_base(), options))
    drafter.begin(np.concatenate([PHRASE, PHRASE]))
    assert drafter.propose(0) is EMPTY
