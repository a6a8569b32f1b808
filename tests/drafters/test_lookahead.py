"""Lookahead against a synthetic target with a period of 96 tokens, verified at every node."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.drafters.interface import MAX_NODES, DraftTree, Source, Verdict, chain
from outrider.drafters.lookahead import POOL_TOKENS, LookaheadDrafter
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
    with_window, without = (
        run(LookaheadOptions(window=w, ngram=4, guesses=4, pool_from_prompt=False), fresh)[1] for w in (8, 1)
    )
    assert without == fresh - 3
    assert with_window < 0.9 * without


WINDOW = LookaheadOptions(window=4, pool_from_prompt=False)


def test_the_window_refines_in_a_tree_that_a_grammar_has_rebuilt() -> None:
    guesses, refined = verified(WINDOW, lambda tree: tree.keep(np.ones(len(tree), np.bool_)))
    assert refined == [target(token) for token in guesses]


@pytest.mark.parametrize("left", range(4))
def test_a_column_that_a_grammar_has_cut_continues_at_its_deepest_node(left: int) -> None:
    guesses, refined = verified(WINDOW, lambda tree: tree.limit(left))
    choices = [target(token) for token in (5, *guesses)]  # at the last token, then at each guess
    assert refined == [*choices[1 : left + 1], *[choices[left]] * (4 - left)]


def test_forced_tokens_and_a_step_without_a_draft_leave_the_window_as_it_is() -> None:
    forced = chain(np.array([7, 8], np.int32), np.ones(2, np.float32), Source.GRAMMAR)
    assert len(verified(WINDOW, lambda _: forced)) == 1
    drafter = Driven(LookaheadDrafter(WINDOW))
    drafter.begin(np.array([3, 1, 4], np.int32))
    drafter.observe(verify(drafter.propose(0), [3, 1, 4]))
    assert len(drafter._levels) == 1


@pytest.mark.parametrize(
    ("window", "guesses", "budget", "columns"),
    [(6, 8, 3, 0), (6, 8, 4, 1), (6, 8, 24, 2), (6, 8, 56, 6), (6, 8, 64, 6), (15, 15, 64, 8), (15, 15, 120, 15)],
)
def test_window_and_guesses_share_the_budget(window: int, guesses: int, budget: int, columns: int) -> None:
    """The window is refined in every step, and guesses are verified beside it."""
    options = LookaheadOptions(window=window, ngram=5, guesses=guesses)
    drafter, text = Driven(LookaheadDrafter(options)), [target(1)]
    while len(text) < 200:
        text.append(target(text[-1]))
    drafter.begin(np.array(text, np.int32))
    for step in range(10):
        before = [level.tolist() for level in drafter._levels]
        tree = drafter.propose(budget)
        check(tree)
        known = drafter._pool[text[-1]]
        assert len(tree) <= budget
        assert any(tree.path(row) == list(known[-1])[: tree.depths[row]] for row in range(len(tree))) or budget <= 4
        verdict = verify(tree, text)
        drafter.observe(verdict)
        text += verdict.tokens.tolist()
        levels = [level.tolist() for level in drafter._levels]
        assert levels != before or not columns
        assert len(levels) == min(step + 2, options.ngram - 1)
    assert [len(level) for level in levels] == [columns] * 4


def test_repetition_is_drafted_from_the_pool() -> None:
    _, steps = run(LookaheadOptions(), 2000)
    assert steps < 1000


def test_the_pool_is_bounded() -> None:
    drafter = Driven(LookaheadDrafter(LookaheadOptions(guesses=2)))
    text = np.random.default_rng(0).integers(0, 20_000, 50_000).astype(np.int32)
    drafter.begin(text)
    assert len(drafter._pool) == POOL_TOKENS
    assert max(map(len, drafter._pool.values())) <= 2
