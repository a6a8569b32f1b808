"""`trigram`: ADED / Adaptix (arXiv 2407.12021), with its public code's mistakes mended.

A base tri-gram table counted from a corpus, an adaptive layer per session (Algorithm 2), and a search for the
continuations worth verifying (Algorithm 1). Nothing a session learns leaves it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from annotated_types import Ge, Gt, Le

from drafters.adaptive import absorb, learn, new_rows
from drafters.draft import EMPTY, NOTHING, DraftTree, Ints, Verdict
from drafters.ngram import BaseArrays
from drafters.nodes import draft_tree
from drafters.search import best_first, monte_carlo, new_pool

Positive = Annotated[float, Gt(0)]


@dataclass(frozen=True)
class TrigramOptions:
    """The paper's hyper-parameters (Appendix F); what the paper leaves open says so."""

    table: str | None = None  # path of the base table; None = the embedded one, where the tokenizer is the embedded one
    search: Literal["mcts", "best-first"] = "mcts"
    iterations: Annotated[int, Ge(1), Le(10_000)] = 150  # s: of the Monte Carlo search
    c1: Positive = 32.0
    c2: Positive = 8.0
    depth: Annotated[int, Ge(1), Le(32)] = 4  # l: tokens in a continuation
    candidates: Annotated[int, Ge(1), Le(256)] = 24  # n: continuations in a draft
    successors: Annotated[int, Ge(1), Le(64)] = 12  # t: kept per context
    adaptive: bool = True
    feedback: Annotated[int, Ge(0), Le(12)] = 8  # not in the paper: learn the target's top-k at every verified node
    increment: Positive = 1.0  # not in the paper: weight of one emitted tri-gram, a row of the base table weighing 1
    maximum: Positive = 16.0  # not in the paper: where raising a weight stops
    contexts: Annotated[int, Ge(16), Le(1 << 22)] = 16_384  # not in the paper: contexts that a session remembers
    floor: Annotated[float, Ge(0), Le(1)] = 0.002  # not in the paper: least path probability of best-first search
    seed: Annotated[int, Ge(0), Le(1 << 32)] = 0


class TrigramDrafter:
    """ADED for one session. Implements `Drafter`."""

    def __init__(self, base: BaseArrays, options: TrigramOptions) -> None:
        self._base = base
        self._options = options
        self._rows = new_rows(options.contexts, options.successors)
        self._pool = new_pool(1 + options.successors * max(options.iterations, 64), options.successors)
        self._text = np.empty(0, np.int32)  # the committed tokens' tail: all that a tri-gram needs
        self._random = np.array([0], np.uint64)
        self.feedback = options.feedback if options.adaptive else 0

    def begin(self, prompt: Ints, prediction: Ints = NOTHING) -> None:
        self._random[0] = np.uint64(self._options.seed * 2 + 0x9E3779B97F4A7C15)
        self._text = np.empty(0, np.int32)
        self._commit(np.asarray(prompt, np.int32))

    def propose(self, budget: int) -> DraftTree:
        if budget <= 0 or not len(self._text):
            return EMPTY
        chosen = self._options
        last = int(self._text[-1])
        previous = int(self._text[-2]) if len(self._text) > 1 else -1
        if chosen.search == "mcts":
            size = monte_carlo(
                *(self._base, self._rows, self._pool, previous, last, chosen.depth),
                *(chosen.iterations, chosen.candidates, chosen.c1, chosen.c2, self._random),
            )
        else:
            size = best_first(self._base, self._rows, self._pool, previous, last, chosen.depth, budget, chosen.floor)
        return draft_tree(self._pool.nodes, size, budget)

    def observe(self, verdict: Verdict) -> None:
        if verdict.topk_ids.shape[-1]:
            tree = verdict.tree
            absorb(self._base, self._rows, self._text, tree.tokens, tree.parents, verdict.topk_ids, verdict.topk_probs)
        self._commit(verdict.tokens, learnt=verdict.topk_ids.shape[-1] > 0)

    def end(self) -> None:
        pass

    def _commit(self, tokens: Ints, learnt: bool = False) -> None:
        text = np.concatenate([self._text[-2:], tokens])
        if self._options.adaptive and not learnt:
            learn(self._base, self._rows, text, len(tokens), self._options.increment, self._options.maximum)
        self._text = text[-2:]
