"""`trigram`: ADED / Adaptix (arXiv 2407.12021), with the errors of its public code corrected.

A base tri-gram table counted from a corpus, an adaptive layer per session (Algorithm 2), and a search for the
continuations worth verifying (Algorithm 1). Sessions do not share what they learn.
"""

from __future__ import annotations

import numpy as np

from outrider.drafters.interface import EMPTY, MAX_NODES, NOTHING, DraftTree, Ints, Sampling, Verdict
from outrider.drafters.options import TrigramOptions
from outrider.drafters.sequence import Reader, Sequence
from outrider.drafters.state import State, array, join, numbers, part, restore
from outrider.drafters.tables.base_table import BaseArrays
from outrider.drafters.tables.dice import at, new_dice, throw
from outrider.drafters.tables.learned_table import absorb, learn, new_rows
from outrider.drafters.tables.nodes import draft_tree
from outrider.drafters.tables.search import RANKINGS, Trigrams, best_first, monte_carlo, new_pool

# The longest n-gram has this many context tokens.
CONTEXT = 3


class TrigramDrafter:
    """ADED for one session. Implements `Drafter`."""

    prunable = True

    def __init__(self, base: BaseArrays, options: TrigramOptions) -> None:
        self._base = base
        self._options = options
        self._rows = new_rows(options.contexts, options.successors)
        self._trigrams = Trigrams(base, self._rows, options.order)
        self._pool = new_pool(1 + options.successors * max(options.iterations, MAX_NODES), options.successors)
        self._sequence = Sequence()
        self._reader = Reader()
        self._random = np.array([0], np.uint64)
        self._dice = new_dice()
        self.feedback = options.feedback if options.adaptive and not options.max_length else 0

    def begin(self, sequence: Sequence, prediction: Ints = NOTHING, sampling: Sampling | None = None) -> None:
        self._random[0] = np.uint64(self._options.seed * 2 + 0x9E3779B97F4A7C15)
        self._sequence = sequence
        self._dice = throw(self._dice, sampling, sequence.tokens)
        self._learn(self._reader.begin(sequence))

    def propose(self, budget: int, least: float = 0.0) -> DraftTree:
        if budget <= 0 or not len(self._sequence):
            return EMPTY
        size = self._search(budget)
        return draft_tree(self._pool.nodes, size, budget)

    def observe(self, verdict: Verdict) -> None:
        start = len(self._sequence) - len(verdict.tokens)
        if not verdict.topk_ids.shape[-1] or not self.feedback:
            self._learn(start)
            return
        context, tree, order = self._sequence.context(CONTEXT, start), verdict.tree, self._options.order
        absorb(self._base, self._rows, context, tree.tokens, tree.parents, verdict.topk_ids, verdict.topk_probs, order)

    def end(self) -> None:
        pass

    def state(self) -> State:
        return {"known": numbers(self._reader.known), **join(rows=self._rows._asdict())}

    def load(self, saved: State, text: Sequence) -> None:
        restore(self._rows._asdict(), part(saved, "rows"))
        self._reader.resume(text, int(array(saved, "known", np.float64, 1)[0]))

    def _search(self, budget: int) -> int:
        """Marks the nodes of a draft in the pool; returns the pool's size."""
        options, search = self._options, (self._trigrams, self._pool, self._sequence.context(CONTEXT), self._options.depth)
        if options.search == "mcts":
            ranking, summed = RANKINGS.index(options.ranking), options.reward == "sum"
            constants = (options.iterations, options.candidates, options.c1, options.c2)
            return monte_carlo(*search, *constants, self._random, ranking, summed)
        dice = at(self._dice, self._sequence.emitted)
        return best_first(*search, budget, options.floor, 1 if options.search == "greedy" else options.successors, dice)

    def _learn(self, start: int) -> None:
        """Learns the n-grams that end at position `start` or later; with `max_length`, those within the last tokens."""
        options = self._options
        if not options.adaptive:
            return
        shortest, text, count = 2, self._sequence.tokens[max(0, start - CONTEXT) :], len(self._sequence) - start
        if options.max_length:
            shortest, text = options.order, self._sequence.tokens[-options.max_length :]
            count = len(text)
        learn(self._base, self._rows, text, count, options.order, options.increment, options.maximum, shortest)
