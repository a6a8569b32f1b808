"""A draft model whose forward drafts a block: its price, its acceptance by position, and how its chain is used."""

import itertools
import time
from collections.abc import Collection

import numpy as np
import pytest

from outrider.drafters.interface import Drafter, Ints, Verdict
from outrider.drafters.model.chain import ModelChain
from outrider.drafters.model.expectation import Expectation
from outrider.drafters.model.language_model import Candidates
from outrider.drafters.model.pair import Pair
from outrider.drafters.model.union import UnionDrafter
from outrider.drafters.none import NoDrafter
from outrider.verify.cost import CostCurve, ExpertCost
from tests.drafts import Driven, Oracle
from tests.language import ToyModel

PROMPT: Ints = np.array([3, 4, 0], np.int32)
FLAT = np.full(65, 0.040)  # nodes cost nothing
BLOCK = 4
RING = np.full((5, 5), 0.01) + 0.95 * np.roll(np.eye(5), 1, 1)


class Blocks(ToyModel):
    """Says t + 1 after t, for BLOCK tokens; only the first takes a forward."""

    def __init__(self) -> None:
        super().__init__(RING)
        self.blocks = self._used = 0

    @property
    def space(self) -> int:
        return 64 if not self.rows or self._used < BLOCK else 0

    def root(self, count: int) -> Candidates:
        self.blocks += 1
        self._used = 1
        return super().root(count)

    def expand(self, tokens: Collection[int], parents: Collection[int], count: int) -> Candidates:
        self._used += len(tokens)
        assert self._used <= BLOCK
        return super().expand(tokens, parents, count)


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time passes by calls."""
    calls = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: next(calls) / 100)


def new(forward: float, tables: Drafter | None = None, longest: int = 8) -> tuple[Driven, Blocks, Pair]:
    """A drafter whose block takes `forward` seconds beside steps of 0.04."""
    model, pair = Blocks(), Pair(0.04, forward, costs=lambda context: FLAT)
    pair.block = BLOCK
    drafter = Driven(UnionDrafter(tables or NoDrafter(), ModelChain(model, pair), pair, longest, "before"))
    drafter.begin(PROMPT)
    return drafter, model, pair


def step(drafter: Driven, right: int) -> list[int]:
    """Proposes, then emits `right` tokens that go on and one that does not; returns what was proposed."""
    tree, last = drafter.propose(16), int(drafter.sequence.tokens[-1])
    emitted = np.array([*((last + 1 + number) % 5 for number in range(right)), (last + right) % 5], np.int32)
    drafter.observe(Verdict(tree, tree.follow(emitted[:-1]), emitted, seconds=0.04))
    return [int(token) for token in tree.tokens]


def test_a_forward_drafts_a_whole_block_and_what_is_left_of_it_is_not_drafted_again() -> None:
    drafter, model, _ = new(0.01, longest=8)
    assert step(drafter, 0) == [1, 2, 3, 4]
    assert model.blocks == 1
    tree = drafter.propose(2)  # verifies a part of the block
    assert (tree.tokens.tolist(), model.blocks) == ([1, 2], 2)
    emitted = np.array([1, 2, 3], np.int32)
    drafter.observe(Verdict(tree, tree.follow(emitted[:-1]), emitted, seconds=0.04))
    assert drafter.propose(16).tokens.tolist() == [4]
    assert model.blocks == 2


def test_a_block_pays_by_what_all_of_its_tokens_save() -> None:
    """One token in a forward of this length would not."""
    drafter, model, pair = new(0.05)
    step(drafter, 4)
    assert model.blocks == 1
    pair.block = 1
    single = Driven(UnionDrafter(NoDrafter(), ModelChain(Blocks(), pair), pair, 1, "before"))
    single.begin(PROMPT)
    pair.spend(10.0)  # no probes
    pair.draft_seconds = 0.05
    assert not len(single.propose(16))


def test_no_block_is_drafted_where_the_tables_know_the_text() -> None:
    drafter, model, pair = new(0.03, Oracle([(1 + number) % 5 for number in range(40)]))
    pair.spend(10.0)
    for _ in range(3):
        assert len(step(drafter, 4)) >= 4
    assert model.blocks == 0


@pytest.mark.parametrize(("context", "blocks"), [(10, 1), (2000, 0)])
def test_a_block_is_left_out_where_the_text_makes_its_forward_dear(context: int, blocks: int) -> None:
    model, pair = Blocks(), Pair(0.04, 0.01, costs=lambda context: FLAT)
    pair.block, pair.context_seconds = BLOCK, 1e-4
    drafter = Driven(UnionDrafter(NoDrafter(), ModelChain(model, pair), pair, 8, "before"))
    drafter.begin(np.resize(PROMPT, context))
    pair.spend(10.0)  # no probes
    assert (len(drafter.propose(16)) > 0, model.blocks) == (blocks > 0, blocks)


@pytest.mark.parametrize(("expert_seconds", "blocks"), [(0.0, 1), (0.01, 0)])
def test_a_block_is_left_out_where_its_rows_touch_dear_experts(expert_seconds: float, blocks: int) -> None:
    curve = CostCurve([0, 64], [64], [[0.04, 0.04]], experts=ExpertCost(64, 4, expert_seconds))
    model, pair = Blocks(), Pair(0.04, 0.01, costs=curve.at)
    pair.block = BLOCK
    drafter = Driven(UnionDrafter(NoDrafter(), ModelChain(model, pair), pair, 8, "before"))
    drafter.begin(PROMPT)
    pair.spend(10.0)  # no probes
    assert (len(drafter.propose(16)) > 0, model.blocks) == (blocks > 0, blocks)


def test_a_forward_that_takes_longer_than_expected_is_dearer_after_any_text() -> None:
    pair = Pair(0.04, 0.010)
    pair.context_seconds = 1e-5
    for _ in range(200):
        pair.record_forward(1000, 0.040, beside=False)
    assert pair.forward_seconds(1000) == pytest.approx(0.040, rel=0.01)
    assert pair.forward_seconds(3000) == pytest.approx(0.080, rel=0.01)


def test_acceptance_is_learned_by_position() -> None:
    """First tokens are right, second ones every other time: a block is worth little more than one token."""
    drafter, _, pair = new(0.001)
    for number in range(60):
        step(drafter, 1 + number % 2)
    expectation = Expectation(pair, "NoDrafter")
    first, second, third, _ = expectation.block(BLOCK)
    assert first > 0.9
    assert 0.35 < second / first < 0.65
    assert third < 0.2 * second
    again = Pair()
    again.load(pair.state())
    again.block = BLOCK
    assert Expectation(again, "NoDrafter").block(BLOCK) == pytest.approx(expectation.block(BLOCK))
