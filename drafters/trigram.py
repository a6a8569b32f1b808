"""`trigram`: ADED / Adaptix (arXiv 2407.12021), with the errors of its public code corrected.

A base tri-gram table counted from a corpus, an adaptive layer per session, and a search for the continuations worth verifying.
The search is best-first; the paper's is Monte Carlo. The n-grams of the whole text are learned once; the paper's Algorithm
2 learns those of the last tokens in each step. The target's likeliest tokens are learned, too. Sessions share nothing that they
learn.
"""

from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.drafters.interface import EMPTY, MAX_NODES, NOTHING, Corpora, DraftTree, Ints, Sampling, Verdict
from outrider.drafters.native.library import native, structure, zeros
from outrider.drafters.options import TrigramOptions
from outrider.drafters.sequence import Reader, Sequence
from outrider.drafters.state import State, array, join, numbers, part, restore
from outrider.drafters.tables.base_table import BaseArrays
from outrider.drafters.tables.dice import Dice, at, new_dice, throw
from outrider.drafters.tables.learned_table import FEEDBACK, SUCCESSORS, TABLE_ORDER, LearnedRows, absorb, learn, new_rows
from outrider.drafters.tables.nodes import Nodes, draft_tree, new_nodes

# The context tokens of the longest n-gram that the library knows.
CONTEXT = 3
# The weight that is added per raised n-gram, and the bound of a raised weight; a row of the base table has total weight 1. The
# paper gives neither.
INCREMENT, MAXIMUM = 1.0, 16.0
# The longest draft in tokens (the paper's l, which is 4), and the minimum path probability that the search expands.
DEPTH, FLOOR = 16, 0.002


@structure
class Trigrams(NamedTuple):
    """The session's n-gram distribution: a base table, the session's rows over it, and the order."""

    base: BaseArrays
    rows: LearnedRows
    order: int  # n-grams of 2 to `order` tokens


@structure
class Pool(NamedTuple):
    """Search nodes, and a buffer."""

    nodes: Nodes  # [P]
    row_tokens: NDArray[np.int32]  # [S]; buffer for one successor list
    row_probabilities: NDArray[np.float32]  # [S]


def new_pool(nodes: int, row: int) -> Pool:
    """Room for `nodes` search nodes with at most `row` children each."""
    return zeros(Pool, row, nodes=new_nodes(nodes))


class TrigramDrafter:
    """ADED for one session. Implements `Drafter`."""

    feedback = FEEDBACK
    prunable = True

    def __init__(self, base: BaseArrays, options: TrigramOptions) -> None:
        self._base = base
        self._rows = new_rows(options.contexts, SUCCESSORS)
        self._trigrams = Trigrams(base, self._rows, TABLE_ORDER)
        self._pool = new_pool(1 + SUCCESSORS * MAX_NODES, SUCCESSORS)
        self._sequence = Sequence()
        self._reader = Reader()
        self._dice = new_dice()

    def begin(
        self, sequence: Sequence, prediction: Ints = NOTHING, sampling: Sampling | None = None, corpora: Corpora | None = None
    ) -> None:
        self._sequence = sequence
        self._dice = throw(self._dice, sampling, sequence.tokens)
        self._learn(self._reader.begin(sequence))

    def propose(self, budget: int, least: float = 0.0) -> DraftTree:
        if budget <= 0 or not len(self._sequence):
            return EMPTY
        context, dice = self._sequence.context(CONTEXT), at(self._dice, self._sequence.emitted)
        size = best_first(self._trigrams, self._pool, context, DEPTH, budget, FLOOR, dice)
        return draft_tree(self._pool.nodes, size, budget)

    def observe(self, verdict: Verdict) -> None:
        start = len(self._sequence) - len(verdict.tokens)
        if not verdict.topk_ids.shape[-1]:
            self._learn(start)
            return
        context, tree = self._sequence.context(CONTEXT, start), verdict.tree
        absorb(self._base, self._rows, context, tree.tokens, tree.parents, *verdict.feedback, TABLE_ORDER)

    def end(self) -> None:
        pass

    def state(self) -> State:
        return {"known": numbers(self._reader.known), **join(rows=self._rows._asdict())}

    def load(self, saved: State, text: Sequence) -> None:
        restore(self._rows._asdict(), part(saved, "rows"))
        self._reader.resume(text, int(array(saved, "known", np.float64, 1)[0]))

    def _learn(self, start: int) -> None:
        """Learns the n-grams that end at position `start` or later."""
        text, count = self._sequence.tokens[max(0, start - CONTEXT) :], len(self._sequence) - start
        learn(self._base, self._rows, text, count, TABLE_ORDER, INCREMENT, MAXIMUM)


@partial(native, module="search")
def best_first(
    trigrams: Trigrams, pool: Pool, text: NDArray[np.int32], depth: int, budget: int, floor: float, dice: Dice
) -> int:
    """Marks the `budget` likeliest nodes of up to `depth` tokens and at least `floor` path probability; returns the size.

    `text` has the last three tokens, -1 = none.
    """
