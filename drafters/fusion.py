"""`fusion`: one tree of the likeliest paths from all sources.

The session's own text, the corpora, the tri-gram table with the target's feedback and the client's prediction are levels of
one mixture (`outrider.drafters.tables.mixture`), whose weights are learned. A path's probability is the product of its tokens'
probabilities; the tree holds the `budget` likeliest paths, found best-first.
"""

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from outrider.drafters.interface import EMPTY, MAX_NODES, NOTHING, Corpora, DraftTree, Ints, Sampling, Verdict
from outrider.drafters.native.library import native
from outrider.drafters.options import FusionOptions
from outrider.drafters.prediction import MEMORY, realign
from outrider.drafters.sequence import Reader, Sequence
from outrider.drafters.state import State, array, join, numbers, part, restore
from outrider.drafters.tables.base_table import BaseArrays
from outrider.drafters.tables.dice import Dice, at, new_dice, throw
from outrider.drafters.tables.learned_table import FEEDBACK, SUCCESSORS, TABLE_ORDER, absorb, new_rows
from outrider.drafters.tables.mixture import (
    STRENGTH,
    Contexts,
    Scratch,
    Sources,
    enter,
    load_prior,
    new_contexts,
    new_history,
    new_scratch,
)
from outrider.drafters.tables.nodes import Nodes, draft_tree, new_nodes
from outrider.drafters.tables.suffix import LONGEST_CONTEXT, Corpus, index
from outrider.drafters.trigram import CONTEXT

# At most this many outcomes of steps wait for the next draft: learning them together takes less time, and none while nothing
# is drafted.
MAX_UNLEARNED = 16

# The longest path in tokens. Nodes of lower path probability are not drafted.
DEPTH, MIN_PATH = 32, 1e-6


class FusionDrafter:
    """Fusion for one session. Implements `Drafter`."""

    feedback = FEEDBACK
    prunable = True

    def __init__(self, base: BaseArrays, corpora: Collection[Corpus], options: FusionOptions, vocabulary: int) -> None:
        """Token ids are below `vocabulary`. Each request reads the blocks that `corpora` has when it begins; their number
        must not change.
        """
        trust, boost = load_prior()
        self._corpora = corpora or (index(np.empty(0, np.int64), vocabulary),)
        self._sources = Sources(
            (),
            new_history(options.capacity),
            base,
            new_rows(options.contexts, SUCCESSORS),
            np.zeros(1, np.int32),
            trust * STRENGTH,
            np.full(len(trust), STRENGTH),
            boost,
        )
        self._contexts = new_contexts(1 + MAX_NODES, len(self._corpora))
        self._scratch = new_scratch(vocabulary, len(self._corpora), 2 * SUCCESSORS)
        self._nodes = new_nodes(1 + MAX_NODES)
        self._sequence = Sequence()
        self._reader = Reader()
        self._unlearned: list[tuple[int, Verdict]] = []  # outcomes in order, each with the length of the text after it
        self._expected_before = 0  # position in the prediction before the last step
        self._dice = new_dice()

    def begin(
        self, sequence: Sequence, prediction: Ints = NOTHING, sampling: Sampling | None = None, corpora: Corpora | None = None
    ) -> None:
        expected = np.concatenate([[len(prediction)], prediction]).astype(np.int32)
        blocks = tuple(self._corpora if corpora is None else corpora)
        self._sources = self._sources._replace(corpora=blocks, expected=expected)
        self._dice = throw(self._dice, sampling, sequence.tokens)
        self._sequence = sequence
        known = self._reader.begin(sequence)
        enter(self._sources, self._contexts, sequence.tokens[max(0, known - LONGEST_CONTEXT) : known])
        self._commit(sequence.tokens[known:])
        self._contexts.expected[0] = (1, 0) if len(prediction) else (0, 0)

    def propose(self, budget: int, least: float = 0.0) -> DraftTree:
        if budget <= 0 or not len(self._sequence):
            return EMPTY
        self._learn()
        limit, least = min(budget, MAX_NODES), max(MIN_PATH, least)
        dice = at(self._dice, self._sequence.emitted)
        sources, contexts, scratch, nodes = self._sources, self._contexts, self._scratch, self._nodes
        size = _grow(sources, contexts, scratch, nodes, limit, least, DEPTH, dice)
        return draft_tree(self._nodes, size, budget)

    def observe(self, verdict: Verdict) -> None:
        self._unlearned.append((len(self._sequence), verdict))
        if len(self._unlearned) == MAX_UNLEARNED:
            self._learn()

    def end(self) -> None:
        self._learn()
        self._sources = self._sources._replace(corpora=(), expected=np.zeros(1, np.int32))

    def state(self) -> State:
        self._learn()
        history, rows = self._sources.history._asdict(), self._sources.rows._asdict()
        return {"known": numbers(self._reader.known), **self._trust, **join(history=history, rows=rows)}

    def load(self, saved: State, text: Sequence) -> None:
        restore(self._trust, saved)
        restore(self._sources.history._asdict(), part(saved, "history"))
        restore(self._sources.rows._asdict(), part(saved, "rows"))
        self._reader.resume(text, int(array(saved, "known", np.float64, 1)[0]))

    @property
    def _trust(self) -> State:
        return {"hits": self._sources.hits, "tries": self._sources.tries}

    def _commit(self, tokens: Ints) -> None:
        self._expected_before = int(self._contexts.expected[0, 0])
        _commit_all(self._sources, self._contexts, self._scratch, tokens)

    def _learn(self) -> None:
        for length, verdict in self._unlearned:
            self._commit(verdict.tokens)
            if verdict.topk_ids.shape[-1]:
                self._absorb(verdict, length - len(verdict.tokens))
            self._realign(length, len(verdict.tokens))
        self._unlearned.clear()

    def _absorb(self, verdict: Verdict, start: int) -> None:
        """Blends the target's feedback, after the first `start` tokens of the text, into the tri-gram rows."""
        base, rows, tree = self._sources.base, self._sources.rows, verdict.tree
        context = self._sequence.context(CONTEXT, start)
        absorb(base, rows, context, tree.tokens, tree.parents, *verdict.feedback, TABLE_ORDER)

    def _realign(self, length: int, emitted: int) -> None:
        """Finds the position in the prediction again after the answer has departed from it.

        The text had `length` tokens then, the last `emitted` of them from the last step.
        """
        expected = self._sources.expected[1:]
        if len(expected) and self._contexts.expected[0, 0] == 0:
            near = max(0, self._expected_before - 1) + emitted
            position = realign(expected, self._sequence.tokens[max(0, length - MEMORY) : length], near)
            self._contexts.expected[0] = (1 + min(len(expected), position), 0)


@native
def _commit_all(sources: Sources, contexts: Contexts, scratch: Scratch, tokens: NDArray[np.int32]) -> None:
    """Commits the tokens in order."""


@native
def _grow(
    sources: Sources, contexts: Contexts, scratch: Scratch, nodes: Nodes, budget: int, least: float, depth: int, dice: Dice
) -> int:
    """Marks the `budget` likeliest paths, each likelier than `least`; returns the number of nodes, node 0 included.

    `nodes.rows` holds them by descending probability.
    """
