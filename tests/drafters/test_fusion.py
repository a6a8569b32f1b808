"""Fusion and its sources: well-formed, reproducible trees; what is learned in a session, and measured costs and gains."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.drafters.fusion import FusionDrafter
from outrider.drafters.interface import EMPTY, MAX_NODES, NOTHING, Source, Verdict
from outrider.drafters.options import FusionOptions, TrigramOptions
from outrider.drafters.policy import Calibration, Share, Trust
from outrider.drafters.tables import base_table
from outrider.drafters.tables.base_table import empty_base
from outrider.drafters.tables.suffix import Corpus, index
from outrider.drafters.trigram import TrigramDrafter
from tests.drafts import Driven
from tests.trees import check

VOCABULARY = 60
PHRASE = np.arange(10, 40, dtype=np.int32)


def fusion(corpus: Corpus | None = None) -> Driven:
    return Driven(FusionDrafter(empty_base(), [] if corpus is None else [corpus], FusionOptions(capacity=256), VOCABULARY))


def texts(longest: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, 9), min_size=1, max_size=longest)


@settings(max_examples=60)
@given(texts(150), texts(20), st.integers(1, MAX_NODES), st.booleans())
def test_trees_are_well_formed_and_repeatable(text: list[int], more: list[int], budget: int, with_corpus: bool) -> None:
    block = index(np.array([50, *text[::-1], 50, *text], np.int64), 50) if with_corpus else None
    trees = []
    for _ in range(2):
        drafter = fusion(block)
        drafter.begin(np.array(text, np.int32))
        check(drafter.propose(budget))
        drafter.observe(Verdict(EMPTY, NOTHING, np.array(more, np.int32)))
        tree = drafter.propose(budget)
        check(tree)
        assert len(tree) <= budget
        trees.append((tree.tokens.tolist(), tree.parents.tolist(), tree.probability.tolist()))
    assert trees[0] == trees[1]


def test_the_sessions_own_text_is_drafted() -> None:
    drafter = fusion()
    drafter.begin(np.concatenate([PHRASE, [1, 2], PHRASE[:4]]).astype(np.int32))
    tree = drafter.propose(24)
    assert tree.path(int(tree.depths.argmax()))[:8] == PHRASE[4:12].tolist()
    assert tree.source[0] == Source.LOOKUP


def test_a_corpus_is_drafted_from() -> None:
    drafter = fusion(index(np.array([50, *PHRASE], np.int64), 50))
    drafter.begin(PHRASE[:3])
    tree = drafter.propose(16)
    assert tree.tokens[0] == PHRASE[3]
    assert Source.RETRIEVAL in tree.source


def test_the_targets_feedback_is_drafted() -> None:
    drafter = fusion()
    drafter.begin(np.array([1, 2], np.int32))
    ids, probabilities = np.array([[30, 31]], np.int32), np.array([[0.9, 0.05]], np.float32)
    drafter.observe(Verdict(EMPTY, NOTHING, np.array([30], np.int32), ids, probabilities))
    drafter.observe(Verdict(EMPTY, NOTHING, np.array([1, 2], np.int32), np.array([[1, 5]], np.int32), probabilities))
    tree = drafter.propose(16)
    assert tree.tokens[0] == 30
    assert 31 in tree.tokens


def test_a_prediction_is_followed_and_realigned() -> None:
    drafter = fusion()
    drafter.begin(np.array([1, 2], np.int32), PHRASE)
    tree = drafter.propose(24)
    assert tree.path(int(tree.depths.argmax()))[:10] == PHRASE[:10].tolist()
    assert tree.source[0] == Source.PREDICTION
    drafter.observe(Verdict(EMPTY, NOTHING, np.array([10, 11, 5], np.int32)))  # departs
    drafter.observe(Verdict(EMPTY, NOTHING, np.array([13, 14], np.int32)))  # and returns
    assert drafter.propose(24).tokens[0] == 15
    drafter.end()
    drafter.begin(np.array([1, 2], np.int32))
    assert Source.PREDICTION not in drafter.propose(24).source


def test_sessions_learn_nothing_from_each_other() -> None:
    block = index(np.array([50, *PHRASE], np.int64), 50)
    first, second = fusion(block), fusion(block)
    before = fusion(block)
    first.begin(np.array([41, 42, 43, 44] * 20, np.int32))
    for drafter in (second, before):
        drafter.begin(np.array([41, 42], np.int32))
    assert second.propose(24).tokens.tolist() == before.propose(24).tokens.tolist()
    assert 43 not in second.propose(24).tokens


def test_a_share_moves_from_the_assumption_to_the_latest_cases() -> None:
    share = Share(0.7, cases=6, most=20)
    assert share.mean == 0.7
    share.record(False)
    assert share.mean == pytest.approx(0.6)
    for _ in range(200):
        share.record(False)
    assert share.mean < 0.01
    share.record(True)
    assert share.mean > 0.05


def test_trust_follows_accepted_over_expected_tokens() -> None:
    trust = Trust()
    assert trust.factor == 1.0
    for _ in range(100):
        trust.record(4.0, 1)
    assert trust.factor == pytest.approx(0.25, abs=0.01)
    for _ in range(100):
        trust.record(1.0, 3)
    assert trust.factor == 1.0


def test_calibration_moves_from_the_models_probability_to_the_measured_one() -> None:
    calibration = Calibration(2)
    assert calibration.acceptance(0, 0.55) == pytest.approx(0.55)
    for _ in range(50):
        calibration.record([0, 1], [0.55, 0.2], 0)
    assert calibration.acceptance(0, 0.55) > 0.9
    assert calibration.acceptance(1, 0.2) < 0.1
    assert calibration.acceptance(0, 0.85) == pytest.approx(0.85)


NONE = np.empty(0, np.int32)
LEARNED = np.array([11, 12, 13, 14, 15], np.int32)


def test_emitted_tokens_are_learned() -> None:
    drafter = Driven(TrigramDrafter(base_table.empty_base(), TrigramOptions()))
    drafter.begin(np.array([1], np.int32))
    assert len(drafter.propose(16)) == 0
    drafter.observe(Verdict(EMPTY, NONE, LEARNED))
    drafter.observe(Verdict(EMPTY, NONE, LEARNED[:2]))
    tree = drafter.propose(16)
    assert tree.tokens[0] == 13


def test_what_is_learned_stays_in_the_session() -> None:
    base = base_table.empty_base()
    first, second = (Driven(TrigramDrafter(base, TrigramOptions())) for _ in range(2))
    first.begin(LEARNED)
    first.end()
    for drafter, expected in ((first, [13]), (second, [])):
        drafter.begin(LEARNED[:2])
        assert drafter.propose(16).tokens[:1].tolist() == expected
