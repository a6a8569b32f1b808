"""The reasoning budget over draft trees: each node has the mask of plain decoding, and drafts do not change the answer."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.drafters.interface import EMPTY, DraftTree
from outrider.verify.constraints.reasoning import ReasoningBudget
from outrider.verify.sampling_params import ReasoningLimit
from tests.trees import trees

VOCABULARY, OPENING, CLOSING = 8, 0, 1


def after(limit: ReasoningLimit, tokens: list[int]) -> ReasoningBudget:
    """The budget after these tokens."""
    budget = ReasoningBudget(limit, VOCABULARY)
    budget.commit(np.array(tokens, np.int32))
    return budget


def is_forced(budget: ReasoningBudget) -> bool:
    """Whether only the closing token is allowed."""
    _, allowed = budget.visit(EMPTY, 0)
    assert allowed is None or allowed[0].tolist() == [token == CLOSING for token in range(VOCABULARY)]
    return allowed is not None


@given(trees(vocabulary=VOCABULARY, nodes=12), st.integers(0, 4), st.sampled_from([None, OPENING]))
def test_every_mask_is_that_of_its_path(tree: DraftTree, max_tokens: int, opening: int | None) -> None:
    limit = ReasoningLimit(max_tokens, CLOSING, opening)
    visited, allowed = ReasoningBudget(limit, VOCABULARY).visit(tree, 64)
    assert visited is tree
    for row in range(-1, len(tree)):
        path = tree.path(row) if row >= 0 else []
        masked = allowed is not None and not allowed[row + 1].all()
        assert masked == is_forced(after(limit, path))


@pytest.mark.parametrize(
    ("limit", "tokens", "forced"),
    [
        (ReasoningLimit(2, CLOSING), [5], False),
        (ReasoningLimit(2, CLOSING), [5, 6], True),
        (ReasoningLimit(2, CLOSING), [5, 6, CLOSING], False),
        (ReasoningLimit(2, CLOSING), [CLOSING, 5, 6], False),  # closed by the model
        (ReasoningLimit(0, CLOSING), [], True),
        (ReasoningLimit(2, CLOSING, OPENING), [OPENING, 5], False),
        (ReasoningLimit(2, CLOSING, OPENING), [OPENING, 5, 6], True),
        (ReasoningLimit(2, CLOSING, OPENING), [5, OPENING, 6, 7], False),  # the answer does not begin with reasoning
    ],
)
def test_only_the_closing_token_is_allowed_at_the_limit(limit: ReasoningLimit, tokens: list[int], forced: bool) -> None:
    assert is_forced(after(limit, tokens)) == forced
