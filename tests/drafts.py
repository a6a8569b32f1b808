"""Test drafters: one drafts a known answer, one drafts at random; and a driver for any drafter."""

from typing import Any, cast

import numpy as np

from outrider.drafters.interface import (
    EMPTY,
    NOTHING,
    Corpora,
    Drafter,
    DraftTree,
    Ints,
    Sampling,
    Source,
    Verdict,
    arrange,
    chain,
)
from outrider.drafters.options import DraftGraphOptions, DraftOptions, DraftTreeOptions, Options, PearlOptions
from outrider.drafters.sequence import Sequence
from outrider.drafters.state import Stateless
from tests.trees import tree_of

# Drafters with a draft model draft whether or not that pays: beside a tiny target, it does not.
EAGER = Options(
    draft=DraftOptions(only_if_worth=False),
    draft_tree=DraftTreeOptions(only_if_worth=False),
    draft_graph=DraftGraphOptions(only_if_worth=False),
    pearl=PearlOptions(only_if_worth=False),
)


class Oracle(Stateless):
    """Drafts the known continuation `answer`, `length` tokens at a time, with every `wrong`-th token falsified."""

    def __init__(self, answer: list[int], length: int = 6, wrong: int = 0) -> None:
        self._answer = np.array(answer, np.int32)
        self._length = length
        self._wrong = wrong
        self._at = 0

    def begin(
        self, sequence: Sequence, prediction: Ints = NOTHING, sampling: Sampling | None = None, corpora: Corpora | None = None
    ) -> None:
        self._at = 0

    def propose(self, budget: int, least: float = 0.0) -> DraftTree:
        tokens = self._answer[self._at : self._at + min(self._length, budget)].copy()
        if self._wrong:
            tokens[self._wrong - 1 :: self._wrong] -= 1
        np.maximum(tokens, 0, out=tokens)
        return chain(tokens, np.full(len(tokens), 0.5, np.float32), Source.LOOKUP)

    def observe(self, verdict: Verdict) -> None:
        self._at += len(verdict.tokens)


class Bush(Oracle):
    """Drafts the answer with `wrong` other tokens before each of its own, so accepted rows are far apart."""

    def propose(self, budget: int, least: float = 0.0) -> DraftTree:
        answer = self._answer[self._at :][: budget // (1 + self._wrong)].tolist()
        tokens = [(token + other) % (max(answer) + 1) for token in answer for other in range(self._wrong, -1, -1)]
        above = np.arange(-1, len(answer) - 1) * (1 + self._wrong) + self._wrong
        parents = [max(-1, int(parent)) for parent in above for _ in range(1 + self._wrong)]
        return arrange(tokens, parents, [0.5] * len(tokens), [Source.LOOKUP] * len(tokens))[0]


class Chaos(Stateless):
    """Drafts random two-way trees over a small vocabulary."""

    def __init__(self, vocabulary: int, seed: int = 0) -> None:
        self._random = np.random.default_rng(seed)
        self._vocabulary = vocabulary

    def begin(
        self, sequence: Sequence, prediction: Ints = NOTHING, sampling: Sampling | None = None, corpora: Corpora | None = None
    ) -> None:
        pass

    def propose(self, budget: int, least: float = 0.0) -> DraftTree:
        if budget < 6:
            return EMPTY
        left, right = self._random.choice(self._vocabulary, (2, 2), replace=False)
        tokens = [left[0], left[1], right[1], right[0], left[1], right[1]]
        return tree_of(tokens, (-1, 0, 0, -1, 3, 3), (0.5, 0.2, 0.1, 0.4, 0.2, 0.1), Source.LOOKUP)


class Driven:
    """A drafter with the text of its session, called as the decode loop calls it."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter: Any = drafter
        self.sequence = Sequence()

    def begin(self, prompt: Ints, prediction: Ints = NOTHING, sampling: Sampling | None = None) -> None:
        """Starts a request with `prompt` (int32 [P])."""
        self.sequence.begin(prompt)
        self.drafter.begin(self.sequence, prediction, sampling)

    def propose(self, budget: int, least: float = 0.0) -> DraftTree:
        return cast(DraftTree, self.drafter.propose(budget))

    def observe(self, verdict: Verdict) -> None:
        """Commits the verdict's tokens, then notifies the drafter."""
        self.sequence.append(verdict.tokens)
        self.drafter.observe(verdict)

    def end(self) -> None:
        self.drafter.end()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.drafter, name)
