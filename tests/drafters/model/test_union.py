"""The drafts of tables and of a draft model in one tree."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from outrider.drafters.interface import Drafter, DraftTree, Draws, Ints, Source, Verdict, chain
from outrider.drafters.model.chain import ModelChain
from outrider.drafters.model.pair import Pair
from outrider.drafters.model.union import UnionDrafter, merge
from outrider.drafters.none import NoDrafter
from outrider.drafters.options import DraftTime
from tests.drafts import Driven, Oracle
from tests.language import ToyModel
from tests.trees import check, trees


def paths(tree: DraftTree) -> dict[tuple[int, ...], float]:
    return {tuple(tree.path(row)): float(tree.probability[row]) for row in range(len(tree))}


@given(trees(vocabulary=5), trees(vocabulary=5), st.integers(1, 60))
def test_the_likeliest_nodes_of_both_trees_are_kept(left: DraftTree, right: DraftTree, budget: int) -> None:
    tree = merge(left, right, budget)
    check(tree)
    ours, theirs = paths(left), paths(right)
    best = {path: max(ours.get(path, 0), theirs.get(path, 0)) for path in ours.keys() | theirs.keys()}
    assert len(tree) == min(budget, len(best))
    found = paths(tree)
    assert all(found[path] == best[path] for path in found)
    left_out = [best[path] for path in best.keys() - found.keys()]
    assert not left_out or max(left_out) <= min(found.values()) + 1e-6


@given(trees(vocabulary=5), st.integers(1, 9), st.integers(0, 5))
def test_sampled_nodes_are_kept_beside_the_likeliest_guesses(left: DraftTree, size: int, room: int) -> None:
    tokens, path = np.arange(size, dtype=np.int32) % 5, np.full(size, 1e-6, np.float32)
    q = [np.eye(5, dtype=np.float32)[token] for token in tokens]
    sampled = replace(chain(tokens, path, Source.DRAFT), draws={row - 1: Draws(q[row], (row,)) for row in range(size)})
    tree = merge(left, sampled, size + room)
    check(tree)
    assert len(tree) <= size + room
    assert tree.drawn.sum() == size
    for row, draws in tree.draws.items():
        assert (tree.parents[list(draws.rows)] == row).all()
        assert draws.q[tree.tokens[list(draws.rows)]].all()
    assert tuple(tokens.tolist()) in paths(tree)


RING = np.full((5, 5), 0.01) + np.roll(np.eye(5), 1, 1)  # 0 -> 1 -> 2 -> 3 -> 4 -> 0
RING /= RING.sum(1, keepdims=True)
PROMPT: Ints = np.array([3, 4, 0], np.int32)


def new(time: DraftTime, model: ToyModel | None = None, tables: Drafter | None = None) -> tuple[Driven, ToyModel]:
    model = model or ToyModel(RING)
    chain = ModelChain(model, Pair(), choices=2, window=3)
    return Driven(UnionDrafter(tables or NoDrafter(), chain, Pair(), 4, time, only_if_worth=False)), model


def step(drafter: Driven, *tokens: int) -> dict[tuple[int, ...], float]:
    """Proposes, then emits `tokens`; returns the proposed paths."""
    tree = drafter.propose(16)
    check(tree)
    emitted = np.array(tokens, np.int32)
    drafter.observe(Verdict(tree, tree.follow(emitted[:-1]), emitted, seconds=0.01))
    return paths(tree)


def test_the_model_drafts_before_a_verification() -> None:
    drafter, model = new("before")
    drafter.begin(PROMPT)
    first = step(drafter, 1, 2, 0)
    assert {(1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)} <= first.keys()
    assert max(map(len, first)) == 4
    assert len(first) == 8  # a second choice beside each token
    forwards = len(model.forwards)
    assert (1,) in step(drafter, 1)
    assert len(model.forwards) > forwards


def test_the_model_drafts_during_a_verification() -> None:
    """A step without a chain verifies the tables' tree, and the next one what the model has drafted meanwhile."""
    drafter, _ = new("during", tables=Oracle([1, 4, 9, 9, 9]))
    drafter.begin(PROMPT)
    assert (1, 4) in step(drafter, 1)
    assert (2, 3, 4) in step(drafter, 2, 3)
    assert (4, 0, 1) in step(drafter, 0)
    assert (1,) not in step(drafter, 1)
