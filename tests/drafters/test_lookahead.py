"""Lookahead against a synthetic target with a period of 96 tokens, verified at every node."""

from collections.abc import Callable

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from outrider.drafters.interface import MAX_NODES, DraftTree, Verdict
from outrider.drafters.lookahead import LookaheadDrafter
from outrider.drafters.options import LookaheadOptions
from tests.drafts import Driven
from tests.trees import check


def target(last: int) -> int:
    return last * 5 % 97  # 5 generates all non-zero residues, so the text has a period of 96 tokens


def verify(tree: DraftTree, text: list[int]) -> Verdict:
    """The target's choices at the root and at every node, and the accepted path."""
    chosen = [target(text[-1])]
    for row in range(len(tree)):
        chosen.append(target(int(tree.tokens[row])))
    rows: list[int] = []
    tokens = [chosen[0]]
    node = -1
    while True:
        below = [r for r in range(len(tree)) if tree.parents[r] == node and tree.tokens[r] == tokens[-1]]
        if not below:
            break
        node = below[0]
        rows.append(node)
        tokens.append(chosen[node + 1])
    ids = np.array(chosen, np.int32)[:, None]
    return Verdict(tree, np.array(rows, np.int32), np.array(tokens, np.int32), ids, np.ones_like(ids, np.float32))


def verified(options: LookaheadOptions, kept: Callable[[DraftTree], DraftTree]) -> list[list[int]]:
    """The window's levels after one step that verified only the `kept` part of the draft."""
    drafter, text = Driven(LookaheadDrafter(options)), [3, 1, 4, 1, 5]
    drafter.begin(np.array(text, np.int32))
    drafter.observe(verify(kept(drafter.propose(64)), text))
    return [level.tolist() for level in drafter._levels]


def run(options: LookaheadOptions, length: int, budget: int = 64) -> tuple[list[int], int]:
    drafter = Driven(LookaheadDrafter(options))
    text = [3, 1, 4]
    drafter.begin(np.array(text, np.int32))
    steps = 0
    while len(text) < length:
        tree = drafter.propose(budget)
        check(tree)
        assert len(tree) <= budget
        verdict = verify(tree, text)
        drafter.observe(verdict)
        text += verdict.tokens.tolist()
        steps += 1
    drafter.end()
    return text, steps


@given(st.integers(1, 8), st.integers(2, 6), st.integers(1, 8), st.integers(1, MAX_NODES))
def test_trees_are_well_formed_for_all_settings(window: int, ngram: int, guesses: int, budget: int) -> None:
    text, _ = run(LookaheadOptions(window, ngram, guesses), 60, budget)
    assert all(text[i] == target(text[i - 1]) for i in range(3, len(text)))


def test_the_window_finds_tokens_that_are_not_in_the_text() -> None:
    fresh = 90
    with_window, without = (run(LookaheadOptions(window=w, ngram=4, guesses=4), fresh)[1] for w in (8, 1))
    assert without == fresh - 3
    assert with_window < 0.9 * without


def test_repetition_is_drafted_from_the_pool() -> None:
    _, steps = run(LookaheadOptions(), 2000)
    assert steps < 1000
