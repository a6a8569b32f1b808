"""GSD: recurring continuations are drafted once and copied for verification."""

import numpy as np

from outrider.drafters.interface import DraftTree, Source
from outrider.drafters.model.draft_graph import DraftGraphDrafter
from outrider.drafters.model.draft_tree import DraftTreeDrafter
from outrider.drafters.model.pair import Pair
from outrider.drafters.options import DraftGraphOptions, DraftTreeOptions
from tests.drafters.model.test_draft_tree import PROMPT
from tests.drafts import Driven
from tests.language import ToyModel
from tests.trees import check

# 0 -> 1 or 2; both -> 3 -> 4 -> 5 -> 6 -> 0.
TABLE = np.full((7, 7), 0.01)
for token, *follow in ((0, 1, 2), (1, 3), (2, 3), (3, 4), (4, 5), (5, 6), (6, 0)):
    TABLE[token, follow] = 0.5
TABLE /= TABLE.sum(1, keepdims=True)
PLAIN = DraftTreeOptions(2, 6, 0.3, 0.3, only_if_worth=False)
MERGED = DraftGraphOptions(2, 6, 0.3, 0.3, only_if_worth=False, tau=2)


def paths(tree: DraftTree) -> set[tuple[int, ...]]:
    return {tuple(tree.path(row)) for row in range(len(tree))}


def test_recurring_continuations_are_drafted_once_and_verified_everywhere() -> None:
    plain, merging = ToyModel(TABLE), ToyModel(TABLE)
    tree_drafter, graph_drafter = (
        Driven(DraftTreeDrafter(plain, PLAIN, Pair())),
        Driven(DraftGraphDrafter(merging, MERGED, Pair())),
    )
    for drafter in (tree_drafter, graph_drafter):
        drafter.begin(PROMPT)
    tree, graph = tree_drafter.propose(64), graph_drafter.propose(64)
    check(graph)
    both = {(1, 3, 4, 5, 6), (2, 3, 4, 5, 6)}
    assert both <= paths(tree)
    assert both <= paths(graph)
    # (3, 4) below 2 merges with (3, 4) below 1, so later forwards have one row.
    assert sum(merging.forwards) < sum(plain.forwards)
    copied = graph.source == Source.MERGED
    assert 0 < copied.sum() < len(graph)
    assert (~copied).sum() < len(tree)


def test_copies_are_not_samples() -> None:
    drafter = Driven(
        DraftGraphDrafter(ToyModel(TABLE, np.random.default_rng(1)), DraftGraphOptions(2, 6, 0, 0, only_if_worth=False), Pair())
    )
    drafter.begin(PROMPT)
    tree = drafter.propose(64)
    check(tree)
    assert tree.draws
    assert (tree.drawn == (tree.source != Source.MERGED)).all()
    assert (tree.source == Source.MERGED).any()
