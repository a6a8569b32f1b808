"""`trigram`: ADED / Adaptix (arXiv 2407.12021), with its public code's mistakes mended.

A base tri-gram table counted from a corpus, an adaptive layer per session (Algorithm 2), and a search for the
continuations worth verifying (Algorithm 1). Nothing a session learns leaves it.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from annotated_types import Gt

from drafters.interface import EMPTY, NOTHING, DraftTree, Ints, Sampling, Verdict, common_prefix
from drafters.options import TrigramOptions
from drafters.tables.adaptive import absorb, learn, new_rows
from drafters.tables.ngram import BaseArrays
from drafters.tables.nodes import draft_tree
from drafters.tables.search import best_first, monte_carlo, new_pool

NO_TEXT = np.full(3, -1, np.int32)
Positive = Annotated[float, Gt(0)]


class TrigramDrafter:
    """ADED for one session. Implements `Drafter`."""

    def __init__(self, base: BaseArrays, options: TrigramOptions) -> None:
        self._base = base
        self._options = options
        self._rows = new_rows(options.contexts, options.successors)
        self._pool = new_pool(1 + options.successors * max(options.iterations, 64), options.successors)
        self._seen = NOTHING  # all committed tokens of the session's last request
        self._text = NO_TEXT  # int32 [3], the last committed tokens: all that an n-gram needs
        self._random = np.array([0], np.uint64)
        self.feedback = options.feedback if options.adaptive else 0

    def begin(self, prompt: Ints, prediction: Ints = NOTHING, sampling: Sampling | None = None) -> None:
        self._random[0] = np.uint64(self._options.seed * 2 + 0x9E3779B97F4A7C15)
        prompt = np.asarray(prompt, np.int32)
        # A conversation's next prompt repeats what has been learned already.
        known = common_prefix(self._seen, prompt)
        self._text = np.concatenate([NO_TEXT, prompt[:known]])[-3:]
        self._commit(prompt[known:])
        self._seen = prompt

    def propose(self, budget: int) -> DraftTree:
        if budget <= 0 or self._text[-1] < 0:
            return EMPTY
        chosen = self._options
        if chosen.search == "mcts":
            size = monte_carlo(
                *(self._base, self._rows, self._pool, self._text, chosen.order, chosen.depth),
                *(chosen.iterations, chosen.candidates, chosen.c1, chosen.c2, self._random),
            )
        else:
            width = 1 if chosen.search == "greedy" else chosen.successors
            size = best_first(
                *(self._base, self._rows, self._pool, self._text, chosen.order),
                *(chosen.depth, budget, chosen.floor, width),
            )
        return draft_tree(self._pool.nodes, size, budget)

    def observe(self, verdict: Verdict) -> None:
        if verdict.topk_ids.shape[-1]:
            tree = verdict.tree
            absorb(
                *(self._base, self._rows, self._text, tree.tokens, tree.parents),
                *(verdict.topk_ids, verdict.topk_probs, self._options.order),
            )
        self._commit(verdict.tokens, learnt=verdict.topk_ids.shape[-1] > 0)
        self._seen = np.concatenate([self._seen, verdict.tokens])

    def end(self) -> None:
        pass

    def _commit(self, tokens: Ints, learnt: bool = False) -> None:
        text = np.concatenate([self._text, tokens])
        if self._options.adaptive and not learnt:
            known = text[text >= 0]
            chosen = self._options
            learn(self._base, self._rows, known, len(tokens), chosen.order, chosen.increment, chosen.maximum)
        self._text = text[-3:]
