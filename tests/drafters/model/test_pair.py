"""A draft model's price: when one more token is worth drafting, and what is known of a pair of models."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.drafters.interface import Drafter, DraftTree, Ints, Verdict
from outrider.drafters.model.chain import ModelChain
from outrider.drafters.model.draft_graph import DraftGraphDrafter
from outrider.drafters.model.draft_tree import DraftTreeDrafter
from outrider.drafters.model.expectation import Expectation
from outrider.drafters.model.pair import PROBE_SHARE, Estimate, Pair, kind_of
from outrider.drafters.model.union import UnionDrafter
from outrider.drafters.none import NoDrafter
from outrider.drafters.options import DraftGraphOptions, DraftTreeOptions
from outrider.drafters.sequence import Sequence
from tests.drafts import Driven
from tests.language import ToyModel

FLAT = np.full(65, 0.040)  # nodes cost nothing
PROMPT: Ints = np.array([3, 4, 0], np.int32)


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time passes by calls: a forward of the draft model takes 10 ms."""
    calls = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: next(calls) / 100)


def ring(share: float) -> ToyModel:
    """A model that says t + 1 after t with this probability."""
    table = np.full((5, 5), (1 - share) / 4) * (1 - np.roll(np.eye(5), 1, 1)) + share * np.roll(np.eye(5), 1, 1)
    return ToyModel(table)


def draft(pair: Pair, share: float) -> Drafter:
    return UnionDrafter(NoDrafter(), ModelChain(ring(share), pair), pair, 8)


def draft_tree(pair: Pair, share: float) -> Drafter:
    return DraftTreeDrafter(ring(share), DraftTreeOptions(1, 8, 0.1, 0.0), pair)


def draft_graph(pair: Pair, share: float) -> Drafter:
    return DraftGraphDrafter(ring(share), DraftGraphOptions(1, 8, 0.1, 0.0), pair)


def drafted(
    pair: Pair,
    share: float,
    is_right: bool,
    steps: int = 300,
    make: Callable[[Pair, float], Drafter] = draft,
    confidence: float | None = None,
) -> list[DraftTree]:
    """What is proposed in each step, where the model is always right or always wrong, and the target so confident."""
    drafter = Driven(make(pair, share))
    drafter.begin(PROMPT)
    trees = []
    for _ in range(steps):
        tree = drafter.propose(16)
        last, count = int(drafter.sequence.tokens[-1]), len(tree) + 1 if is_right else 1
        tokens = [(last + 1 + number if is_right else last) % 5 for number in range(count)]
        path = np.arange(count - 1, dtype=np.int32)
        shape = (len(tree) + 1, 0 if confidence is None else drafter.feedback)
        topk = np.zeros(shape, np.int32), np.full(shape, confidence or 0.0, np.float32)
        drafter.observe(Verdict(tree, path, np.array(tokens, np.int32), *topk, seconds=0.04))
        trees.append(tree)
    return trees


@given(st.lists(st.floats(0.0, 1.0), max_size=12), st.floats(0.0, 0.05), st.floats(0.0, 0.2))
def test_an_estimate_verifies_the_nodes_with_the_most_tokens_per_second(
    probability: list[float], slope: float, drafting: float
) -> None:
    costs = (0.04 + slope * np.arange(65)).astype(np.float64)
    estimate = Estimate.of(np.array(probability, np.float32), costs, drafting)
    best = sorted(probability, reverse=True)
    rates = [(1 + sum(best[:count])) / (drafting + costs[count]) for count in range(len(best) + 1)]
    assert estimate.rate() == pytest.approx(max(rates), rel=1e-5)


def test_a_chain_pays_if_its_tokens_take_less_time_than_steps() -> None:
    step = Estimate.of(np.empty(0, np.float32), FLAT)
    assert step.gains_from_chain(0.9, 0.9, 0.9, forward=0.010, fixed=0.0)
    assert not step.gains_from_chain(0.9, 0.9, 0.9, forward=0.040, fixed=0.0)
    assert not step.gains_from_chain(0.2, 0.2, 0.2, forward=0.010, fixed=0.0)


def test_later_tokens_pay_for_what_precedes_the_first() -> None:
    step = Estimate.of(np.empty(0, np.float32), FLAT)
    assert not step.gains(0.95, 0.045, 1)
    assert step.gains_from_chain(0.95, 0.95, 0.95, forward=0.005, fixed=0.040)
    assert not step.gains_from_chain(0.5, 0.5, 0.5, forward=0.005, fixed=0.040)


def test_a_model_that_is_right_drafts_and_one_that_is_wrong_stops() -> None:
    right = drafted(Pair(0.040, 0.010), share=0.95, is_right=True)
    wrong = drafted(Pair(0.040, 0.010), share=0.95, is_right=False)
    assert np.mean([len(tree) for tree in right]) > 1
    assert np.mean([len(tree) for tree in wrong[100:]]) < 0.3
    assert "the draft model adds" in right[-1].work.reason


def test_what_is_known_of_a_pair_serves_the_next_session() -> None:
    pair = Pair(0.040, 0.010)
    drafted(pair, share=0.95, is_right=False)
    assert sum(len(tree) for tree in drafted(pair, share=0.95, is_right=False, steps=50)) <= 8


@pytest.mark.parametrize("make", [draft, draft_tree, draft_graph])
def test_a_new_session_expects_what_equally_confident_text_had(make: Callable[[Pair, float], Drafter]) -> None:
    pair = Pair(0.040, 0.020)
    drafted(pair, 0.95, is_right=True, make=make, confidence=0.95)
    drafted(pair, 0.95, is_right=False, make=make, confidence=0.3)
    drafts = []
    for confidence in (0.95, 0.3):
        known = Pair()
        known.load(pair.state())  # has no time for probes yet
        drafts.append(len(drafted(known, 0.95, False, 2, make, confidence)[1]))
    assert drafts[0] > drafts[1] == 0


@pytest.mark.parametrize(("saved", "reads"), [(0.25, [False, False, True]), (0.0, [False, False, False])])
def test_a_prompt_is_read_once_the_rest_of_the_answer_repays_it(saved: float, reads: list[bool]) -> None:
    """As many tokens are expected as the answer has. The model reads for 0.2 s, and saves 10 ms of a token's 40, or none."""
    pair = Pair(0.040, 0.010, 0.002)
    for _ in range(200):
        pair.record_step("Tables", True, kind_of(None), False, 1, 0.040)
        pair.record_step("Tables", True, kind_of(None), True, 2, 0.080 * (1 - saved))
    found, expectation = [], Expectation(pair, "Tables")
    for emitted in (0, 10, 100):
        sequence = Sequence(PROMPT)
        sequence.append(np.zeros(emitted, np.int32))
        expectation.begin(sequence, None)
        found.append(expectation.repays_reading(unread=100))
    assert found == reads


def test_a_kind_of_text_that_is_new_is_expected_to_be_like_all() -> None:
    pair = Pair(0.040, 0.010, 0.002)
    for is_read, seconds in ((False, 0.040), (True, 0.020)):
        for _ in range(100):
            pair.record_step("Tables", True, 0, is_read, 1, seconds)
    pair.record_step("Tables", True, 1, False, 1, 0.040)
    assert pair.saved_seconds("Tables", True, 1) == pytest.approx(pair.saved_seconds("Tables", True, 0), rel=0.2)
    assert pair.saved_seconds("Tables", True, 2) == pair.saved_seconds("Others", True, 0) == 0


def test_probes_take_a_small_share_of_the_time() -> None:
    pair = Pair(0.040, 0.030)
    for _ in range(100):
        pair.save_for_probes(1.0)
    assert pair.may_probe(PROBE_SHARE * 100)
    pair.spend(PROBE_SHARE * 100)
    assert not pair.may_probe(0.03)


def test_a_pair_that_was_saved_is_known_at_the_next_start() -> None:
    pair = Pair(0.040, 0.010, 0.002)
    drafted(pair, share=0.95, is_right=False)
    loaded = Pair()
    loaded.load(json.loads(json.dumps(pair.state())))
    assert loaded.state() == pair.state()
    assert loaded.acceptance(True).kind(None).mean == pair.acceptance(True).kind(None).mean < 0.5


@pytest.mark.parametrize("saved", [{}, {"draft_seconds": "x"}, []])
def test_a_file_that_is_no_pair_is_refused(saved: object) -> None:
    with pytest.raises(ValueError, match=r"Error|seconds"):
        Pair().load(saved)  # type: ignore[arg-type]
