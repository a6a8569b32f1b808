"""A draft model's price: when one more token is worth drafting, and what is known of a pair of models."""

import itertools
import json
import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.drafters.interface import EMPTY, NO_WORK, Drafter, DraftTree, Ints, Source, Verdict, Work, arrange
from outrider.drafters.model.chain import ModelChain
from outrider.drafters.model.draft_tree import DraftGraphDrafter, DraftTreeDrafter
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
    assert step.any_gains(step.after_chain(0.9, 0.9, 0.9, forward=0.010))
    assert not step.any_gains(step.after_chain(0.9, 0.9, 0.9, forward=0.040))
    assert not step.any_gains(step.after_chain(0.2, 0.2, 0.2, forward=0.010))


def test_drafts_pay_for_what_they_slow_down() -> None:
    chain = {"gain": 0.5, "path": 0.5, "share": 0.5, "forward": 0.010}
    for slowdown, gains in ((1.0, True), (1.3, False)):
        step = Estimate.of(np.empty(0, np.float32), FLAT, slowdown=slowdown)
        assert step.any_gains(step.after_chain(**chain)) == gains


def test_later_tokens_pay_for_what_precedes_the_first() -> None:
    step = Estimate.of(np.empty(0, np.float32), FLAT)
    assert not step.gains(0.95, 0.045, 1)
    assert step.any_gains(step.after_chain(0.95, 0.95, 0.95, forward=0.005, fixed=0.040))
    assert not step.any_gains(step.after_chain(0.5, 0.5, 0.5, forward=0.005, fixed=0.040))


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


@pytest.mark.parametrize(("saved", "reads"), [(0.25, [False, False, True]), (-0.05, [False, False, False])])
def test_a_prompt_is_read_once_the_rest_of_the_answer_repays_it(saved: float, reads: list[bool]) -> None:
    """As many tokens are expected as the answer has. The model reads for 0.2 s, and saves 10 ms of a token's 40, or adds 2."""
    pair = Pair(0.040, 0.010, 0.002)
    for _ in range(200):
        pair.savings("Tables", True, kind_of(None)).record(2, 0.080 * (1 - saved), 1, 0.040)
    found, expectation = [], Expectation(pair, "Tables")
    for emitted in (0, 10, 100):
        sequence = Sequence(PROMPT)
        expectation.begin(sequence, None)
        expectation.start_step(unread=100)
        for _ in range(emitted):
            sequence.append(np.zeros(1, np.int32))
            expectation.observe(plain(0.040), NO_WORK, EMPTY)
        found.append(expectation.repays_reading(unread=100))
    assert found == reads


@pytest.mark.parametrize(("forward", "reads"), [(0.005, True), (0.038, False)])
def test_what_an_unknown_pair_saves_follows_from_its_price(forward: float, reads: bool) -> None:
    sequence, expectation = Sequence(PROMPT), Expectation(Pair(0.040, forward, 0.001), "Tables")
    expectation.begin(sequence, None)
    for _ in range(30):
        sequence.append(np.zeros(1, np.int32))
        expectation.observe(plain(0.040), NO_WORK, EMPTY)
    assert expectation.repays_reading(unread=100) == reads


@pytest.mark.parametrize("speed", [1.0, 3.0])
def test_what_is_saved_is_known_from_the_same_steps(speed: float) -> None:
    """Two tokens instead of one for a draft of a quarter of a step save 3/8, however fast the machine is at the time."""
    pair = Pair(0.040, 0.010)
    tree, _ = arrange(tokens=[4], parents=[-1], probability=[0.9], source=[Source.DRAFT])
    expectation = Expectation(pair, "Tables")
    expectation.begin(Sequence(PROMPT), None)
    expectation.start_step(unread=1)
    for _ in range(2000):
        verdict = Verdict(tree, np.array([0], np.int32), np.array([4, 0], np.int32), seconds=0.040 * speed)
        expectation.observe(verdict, Work(0.010 * speed), EMPTY)
    assert pair.savings("Tables", True, kind_of(None)).share(0.0) == pytest.approx(3 / 8, rel=0.1)


@pytest.mark.parametrize("work", [Work(0.010), Work(beside=True)])
def test_how_much_drafts_slow_the_target_down_is_learned(work: Work) -> None:
    """A step that takes 40 ms takes 50 after a draft, or beside one."""
    pair = Pair(0.040, 0.010)
    expectation = Expectation(pair, "Tables")
    expectation.begin(Sequence(PROMPT), None)
    for _ in range(1000):
        expectation.start_step(unread=1)
        expectation.observe(plain(0.050), pair.priced(work), EMPTY)
        expectation.observe(plain(0.040), NO_WORK, EMPTY)
    assert pair.priced(work).slowdown == pytest.approx(1.25, rel=0.01)
    assert pair.priced(NO_WORK).slowdown == 1.0


def plain(seconds: float) -> Verdict:
    """A step without a draft."""
    return Verdict(EMPTY, np.empty(0, np.int32), np.zeros(1, np.int32), seconds=seconds)


def test_probes_take_a_small_share_of_the_time() -> None:
    pair = Pair(0.040, 0.030)
    for _ in range(100):
        pair.save_for_probes(1.0)
    assert pair.may_probe(PROBE_SHARE * 100)
    pair.spend(PROBE_SHARE * 100)
    assert not pair.may_probe(0.03)


def test_probes_take_a_share_of_the_answers_time() -> None:
    expectation = Expectation(Pair(0.040, 0.010), "Tables")
    expectation.begin(Sequence(PROMPT), None)
    for _ in range(100):
        expectation.observe(plain(0.010), NO_WORK, EMPTY)
    assert [expectation.may_probe(1, seconds) for seconds in (0.140, 0.160)] == [True, False]
    expectation.spend(0.120)
    assert not expectation.may_probe(1, 0.040)


@pytest.mark.parametrize(("block", "forward"), [(1, 0.020), (4, 0.035)])
@pytest.mark.parametrize(("cases", "remaining", "probes"), [(0, 200, True), (20, 200, True), (300, 200, False), (0, 5, False)])
def test_a_probe_is_one_only_if_the_model_may_repay_it(
    cases: int, remaining: int, probes: bool, block: int, forward: float
) -> None:
    """About half of the tokens must be right for drafts to pay. Reading the text takes as long as four steps."""
    pair = Pair(0.040, forward, 0.002)
    pair.block = block
    for case in range(cases):
        pair.acceptance(True).kind(None).record(case % 20 < 7)
    sequence, expectation = Sequence(PROMPT, 100 + remaining), Expectation(pair, "Tables")
    expectation.begin(sequence, None)
    for _ in range(100):
        sequence.append(np.zeros(1, np.int32))
        expectation.observe(plain(0.040), NO_WORK, EMPTY)
    assert expectation.may_probe(80, forward) == probes


def test_what_a_probe_brings_is_not_thought_to_be_saved() -> None:
    """Its draft is not paid for by the step, so it would seem to be free."""
    pair = Pair(0.040, 0.010)
    tree, _ = arrange(tokens=[4], parents=[-1], probability=[0.9], source=[Source.DRAFT])
    expectation = Expectation(pair, "Tables")
    expectation.begin(Sequence(PROMPT), None)
    expectation.start_step(unread=1)
    verdict = Verdict(tree, np.array([0], np.int32), np.array([4, 0], np.int32), seconds=0.040)
    expectation.observe(verdict, Work(invested=0.030), EMPTY)
    assert pair.savings("Tables", True, kind_of(None)).share(0.0) == 0.0


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
