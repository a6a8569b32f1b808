"""Lookahead against a synthetic target with a period of 96 tokens, verified at every node."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from drafters.interface import DraftTree, Verdict
from drafters.lookahead import POOL_TOKENS, LookaheadDrafter
from drafters.options import LookaheadOptions
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


@given(st.integers(1, 8), st.integers(2, 6), st.integers(1, 8), st.integers(1, 64))
def test_trees_are_well_formed_for_all_settings(window: int, ngram: int, guesses: int, budget: int) -> None:
    text, _ = run(LookaheadOptions(window, ngram, guesses), 60, budget)
    assert all(text[i] == target(text[i - 1]) for i in range(3, len(text)))


def test_the_window_finds_tokens_that_are_not_in_the_text() -> None:
    fresh = 90
    with_window, without = (
        run(LookaheadOptions(window=w, ngram=4, guesses=4, pool_from_prompt=False), fresh)[1] for w in (8, 1)
    )
    assert without == fresh - 3
    assert with_window < 0.9 * without


def test_repetition_is_drafted_from_the_pool() -> None:
    _, steps = run(LookaheadOptions(), 2000)
    assert steps < 1000


def test_the_pool_is_bounded() -> None:
    drafter = Driven(LookaheadDrafter(LookaheadOptions(guesses=2)))
    text = np.random.default_rng(0).integers(0, 20_000, 50_000).astype(np.int32)
    drafter.begin(text)
    assert len(drafter._pool) == POOL_TOKENS
    assert max(map(len, drafter._pool.values())) <= 2
