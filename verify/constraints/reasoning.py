"""A limit of the tokens that an answer spends on reasoning: at the limit, only the closing token is allowed.

Works like a grammar: a node's mask depends on its path alone, so limited answers do not depend on drafts.
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.drafters.interface import DraftTree, Ints
from outrider.verify.sampling_params import ReasoningLimit

# START is the state before the first token, and CLOSED that outside of the reasoning.
START, CLOSED = -1, -2


class Constraint(Protocol):
    """The tokens that an answer may have."""

    def visit(self, draft: DraftTree, depth: int) -> tuple[DraftTree, NDArray[np.bool_] | None]:
        """The nodes of `draft` to verify, at most `depth` deep, and the masks of the root and of these nodes [N+1, V].

        None instead of masks if all tokens are allowed everywhere.
        """

    def commit(self, tokens: Ints) -> bool:
        """Advances by emitted tokens, int32 [A]. Returns whether the last one ends the answer, as a stop token does."""


class ReasoningBudget:
    """The state of one answer. Implements `Constraint`; another one may apply to the same answer."""

    def __init__(self, limit: ReasoningLimit, vocabulary: int, other: Constraint | None = None) -> None:
        self._limit = limit
        self._vocabulary = vocabulary
        self._other = other
        # A state is START, CLOSED or the number of reasoning tokens left.
        self._state = limit.max_tokens if limit.opening is None else START

    def visit(self, draft: DraftTree, depth: int) -> tuple[DraftTree, NDArray[np.bool_] | None]:
        tree, allowed = (draft, None) if self._other is None else self._other.visit(draft, depth)
        states = [self._state]  # states of the root and of each node
        for parent, token in zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True):
            states.append(self._next(states[parent + 1], token))
        for row in (row for row, state in enumerate(states) if state == 0):
            if allowed is None:
                allowed = np.ones((len(tree) + 1, self._vocabulary), np.bool_)
            if allowed[row, self._limit.closing]:  # a grammar may know nothing of reasoning
                allowed[row] = False
                allowed[row, self._limit.closing] = True
        return tree, allowed

    def commit(self, tokens: Ints) -> bool:
        for token in tokens.tolist():
            self._state = self._next(self._state, token)
        return self._other is not None and self._other.commit(tokens)

    def _next(self, state: int, token: int) -> int:
        if state == START:
            return self._limit.max_tokens if token == self._limit.opening else CLOSED
        if state == CLOSED or token == self._limit.closing:
            return CLOSED
        return max(0, state - 1)
