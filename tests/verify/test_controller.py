"""What a round computes: the nodes that pay, what its time allows, and chunks of prompts, short ones first."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.drafters.interface import DraftTree, Draws, Source, chain
from outrider.verify.budget import LONGEST_INTERVAL, Budget, Choice, Draft, divide_nodes
from outrider.verify.controller import (
    FIRST_CHUNK_TOKENS,
    MIN_CHUNK_TOKENS,
    OVERLAP_PROBE_INTERVAL,
    READING_FACTOR,
    STEPS_SHARE,
    Controller,
    Plan,
    Times,
)
from outrider.verify.cost import CostCurve
from outrider.verify.measurement import NODES
from outrider.verify.round import OLDEST_SHARE, divide
from outrider.verify.verifier import PREFILL_CHUNK_TOKENS


class Fixed(CostCurve):
    """A curve that steps do not correct: a step takes 1 second, and each further row 0.02 seconds."""

    def __init__(self) -> None:
        super().__init__(NODES, (64,), (tuple(1.0 + 0.02 * nodes for nodes in NODES),), 0.02, 0.1)

    def observe(self, *args: Any, **kwargs: Any) -> None:
        pass


CURVE = Fixed()
LIKELY = chain(np.ones(60, np.int32), np.full(60, 0.99, np.float32), Source.LOOKUP)
NOTHING = chain(np.empty(0, np.int32), np.empty(0, np.float32), Source.LOOKUP)


def plan(controller: Controller, tree: DraftTree = NOTHING, reads: bool = True) -> Plan:
    """A round of one stream's step, beside a prompt of which one token has been read."""
    return controller.plan([Draft(tree, context=1)], [Budget(curve=CURVE)], 1 if reads else None)


def record(controller: Controller, predicted: float, seconds: float, reads: bool, times: int = 100) -> None:
    for _ in range(times):
        controller.record(Plan([], 0, predicted, CURVE, reads=reads), 1, Times(0.0, seconds, None))


def test_a_round_with_a_prompt_may_take_a_multiple_of_its_steps() -> None:
    assert plan(Controller()).seconds == pytest.approx(READING_FACTOR, abs=0.03)


def test_drafts_leave_a_part_of_the_time_to_a_prompt() -> None:
    alone = plan(Controller(), LIKELY, reads=False)
    assert (len(alone.choices[0].tree), alone.chunk_tokens) == (60, 0)
    # Alone, the step takes 2.2; beside a prompt the round takes a multiple of that, and the step at most 0.4 of the round.
    beside = plan(Controller(), LIKELY)
    nodes = len(beside.choices[0].tree)
    assert 1.0 + 0.02 * nodes == pytest.approx(STEPS_SHARE * READING_FACTOR * 2.2, abs=0.03)
    assert beside.seconds == pytest.approx(READING_FACTOR * 2.2, abs=0.03)
    assert beside.seconds == pytest.approx(1.0 + 0.02 * (nodes + beside.chunk_tokens))
    slow = Controller()
    record(slow, 1.0, 4.0, reads=True)
    assert plan(slow, LIKELY).chunk_tokens == MIN_CHUNK_TOKENS


def test_predictions_are_corrected() -> None:
    """Rounds that take longer than predicted get less to read, unless their steps take longer, too."""
    controller = Controller()
    record(controller, 2.0, 3.0, reads=True)
    assert plan(controller).seconds == pytest.approx(READING_FACTOR / 1.5, abs=0.02)
    record(controller, 1.0, 1.5, reads=False)
    assert plan(controller).seconds == pytest.approx(READING_FACTOR, abs=0.03)


def test_a_slow_model_reads_a_prompt_in_small_parts() -> None:
    """So that no part takes longer than the worker may be silent."""

    def chunk(controller: Controller) -> int:
        return controller.plan([], [], 1).chunk_tokens

    controller = Controller(silent_seconds=12.0)
    assert chunk(controller) == FIRST_CHUNK_TOKENS  # its time is not known
    controller.record_reading(64, 32.0)
    assert chunk(controller) == 24
    controller.record_reading(24, 240.0)
    assert chunk(controller) == MIN_CHUNK_TOKENS
    controller.record_reading(8, 0.0008)
    assert chunk(controller) == chunk(Controller()) == PREFILL_CHUNK_TOKENS


def test_rounds_alternate_where_the_host_works_longer_than_the_device() -> None:
    def record(host: float, device: float) -> None:
        controller.record(Plan([]), 1, Times(host, device, None))

    controller = Controller()
    assert not controller.overlaps()
    record(0.002, 0.003)
    assert not controller.overlaps()
    for _ in range(30):
        record(0.009, 0.003)
    assert sum(controller.overlaps() for _ in range(OVERLAP_PROBE_INTERVAL)) == OVERLAP_PROBE_INTERVAL - 1


Prompts = list[list[int]]
goals = st.lists(st.integers(1, 600), min_size=1, max_size=3)
chunks = st.integers(0, 512)


@given(chunks, st.lists(goals, max_size=8))
def test_properties_of_the_order(tokens: int, prompts: Prompts) -> None:
    given_ = divide(tokens, prompts)
    left = [max(each) for each in prompts]
    assert sum(given_) == min(tokens, sum(left))
    assert all(0 <= share <= most for share, most in zip(given_, left, strict=True))
    if prompts:
        assert given_[0] >= min(left[0], tokens / OLDEST_SHARE)
    for number, share in enumerate(given_[1:], start=1):  # whoever gets less than a goal is behind whatever others get
        missed = min((goal for goal in prompts[number] if goal > share), default=None)
        for other, theirs in enumerate(given_[1:], start=1):
            if missed is not None and other != number and theirs:
                reached = min(goal for goal in prompts[other] if goal >= theirs)
                assert (reached, other) <= (missed, number)


@settings(max_examples=20)
@given(st.integers(1, 64), st.lists(st.integers(1, 60), min_size=1, max_size=6), st.data())
def test_every_prompt_ends_however_many_come(tokens: int, first: list[int], data: st.DataObject) -> None:
    """Whatever arrives later, the prompts that are there are read after OLDEST_SHARE chunks for each chunk of theirs."""
    waiting = [[number, left] for number, left in enumerate(first)]
    rounds = sum(-(-left // -(-tokens // OLDEST_SHARE)) for left in first)
    for number in range(rounds):
        shares = divide(tokens, [[left] for _, left in waiting])
        waiting = [[key, left - share] for (key, left), share in zip(waiting, shares, strict=True) if left > share]
        waiting += [[len(first) + number, left] for left in data.draw(st.lists(st.integers(1, 300), max_size=3))]
    assert all(key >= len(first) for key, _ in waiting)


def curve(per_node: float, fixed: float = 1.0) -> CostCurve:
    return CostCurve(NODES, (64,), (tuple(fixed + per_node * nodes for nodes in NODES),))


def draft(*probabilities: float) -> DraftTree:
    path = np.cumprod(np.array(probabilities, np.float32))
    return chain(np.arange(len(path), dtype=np.int32), path.astype(np.float32), Source.LOOKUP)


def select(budget: Budget, tree: DraftTree) -> Choice:
    return divide_nodes([Draft(tree)], [budget])[0]


def test_the_nodes_with_the_most_tokens_per_second_are_kept() -> None:
    tree = draft(0.9, 0.9, 0.9, 0.5, 0.2, 0.1)
    for per_node in (0.0, 0.05, 0.2, 0.5):
        kept = len(select(Budget(curve=curve(per_node)), tree).tree)
        rates = [(1 + tree.probability[:n].sum()) / (1 + per_node * n) for n in range(len(tree) + 1)]
        assert kept == int(np.argmax(rates))


def test_sampled_nodes_are_always_kept() -> None:
    tokens, path = np.array([1, 2, 3], np.int32), np.array([0.9, 0.1, 0.5], np.float32)
    q = np.full(4, 0.25, np.float32)
    draws = {-1: Draws(q, (0,)), 0: Draws(q, (1,))}
    tree = DraftTree(tokens, np.array([-1, 0, -1], np.int32), np.array([1, 2, 1], np.int32), path, np.zeros(3, np.uint8), draws)
    assert select(Budget(curve=curve(0.0)), tree).tree is tree
    kept = select(Budget(curve=curve(0.9)), tree).tree
    assert kept.tokens.tolist() == [1, 2]
    assert kept.draws.keys() == {-1, 0}


def verified(budget: Budget, tree: DraftTree, emitted: list[int], steps: int) -> list[int]:
    sizes = []
    for _ in range(steps):
        proposed = tree if budget.nodes() else draft()
        choice = select(budget, proposed)
        sizes.append(len(choice.tree))
        budget.record(proposed, choice, np.array(emitted[: len(choice.tree) + 1], np.int32), 0.0)
    return sizes


def test_rejected_drafts_stop_within_a_few_steps_and_resume_when_accepted() -> None:
    budget, tree = Budget(curve=curve(0.1)), draft(0.8, 0.8, 0.8, 0.8)
    counts = verified(budget, tree, [9], 100)
    assert counts[0] == 4
    assert sum(counts[24:]) == 0
    resumed = verified(budget, tree, [0, 1, 2, 3, 4], 60)
    assert resumed[-1] == 4


def test_nodes_that_cost_a_step_each_are_only_probed() -> None:
    budget = Budget(curve=curve(1.5))
    assert sum(verified(budget, draft(0.9, 0.9), [0, 1, 2], 50)) == 0
    assert sum(budget.nodes() > 0 for _ in range(40)) == 40 // LONGEST_INTERVAL


@given(st.lists(st.floats(0.01, 0.99), min_size=1, max_size=8), st.floats(0.02, 1.5))
def test_nodes_below_the_least_probability_are_never_verified(probabilities: list[float], slope: float) -> None:
    budget = Budget(curve=curve(slope))
    choice = select(budget, draft(*probabilities))
    assert (choice.tree.probability >= budget.least(0)).all()


def test_streams_share_the_nodes_that_a_round_can_afford() -> None:
    """Nodes cost the same in all streams, so those that promise most are verified, whoever drafted them."""
    likely, unlikely = draft(0.9, 0.9, 0.9), draft(0.35, 0.9)
    costs = curve(0.3)

    def sizes(*streams: tuple[Draft, Budget]) -> list[int]:
        drafts, budgets = zip(*streams, strict=True)
        return [len(choice.tree) for choice in divide_nodes(drafts, budgets)]

    first, second = (Draft(likely), Budget(curve=costs)), (Draft(unlikely), Budget(curve=costs))
    assert sizes(second) == [2]
    assert sizes(first, second) == [3, 0]
    assert sizes(second, first) == [0, 3]
    assert sizes(first, (Draft(unlikely), Budget(5))) == [3, 2]  # a fixed number is kept
    assert sizes(first, (Draft(unlikely, prunable=False), Budget(curve=costs))) == [3, 2]
    distrusted = Budget(curve=costs)
    for _ in range(40):
        distrusted.nodes()
        distrusted.record(likely, Choice(likely, len(likely)), np.array([9], np.int32), 0.0)
    assert sizes((Draft(likely), distrusted), first) == [0, 3]
