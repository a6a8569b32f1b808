"""`lookup`: drafts the continuations of the longest repeated suffix of the session's text (a suffix automaton)."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.drafters.interface import EMPTY, MAX_NODES, NOTHING, Corpora, DraftTree, Ints, Sampling, Verdict
from outrider.drafters.native.library import native, structure
from outrider.drafters.options import LookupOptions
from outrider.drafters.sequence import Reader, Sequence
from outrider.drafters.state import State, array, join, numbers, part, restore
from outrider.drafters.tables.automaton import TOKENS, Automaton, append, new_automaton, repeated_suffix
from outrider.drafters.tables.dice import Dice, at, new_dice, throw
from outrider.drafters.tables.nodes import Nodes, draft_tree, new_nodes

# The longest continuation.
MAX_DEPTH = 16
# On average, this many candidates for each draft node fit into the search.
BRANCHES = 16


@structure
class Candidates(NamedTuple):
    """Continuations of the text."""

    nodes: Nodes  # [P]
    states: NDArray[np.int32]  # [P]; the automaton's state at each node


class LookupDrafter:
    """Lookup for one session. Implements `Drafter`."""

    feedback = 0
    prunable = True

    def __init__(self, options: LookupOptions) -> None:
        self._shortest = options.shortest
        self._automaton = new_automaton(options.capacity)
        self._reader = Reader()
        self._sequence = Sequence()
        self._dice = new_dice()
        size = 1 + MAX_NODES * BRANCHES
        self._candidates = Candidates(new_nodes(size), np.zeros(size, np.int32))

    def begin(
        self, sequence: Sequence, prediction: Ints = NOTHING, sampling: Sampling | None = None, corpora: Corpora | None = None
    ) -> None:
        self._sequence, self._dice = sequence, throw(self._dice, sampling, sequence.tokens)
        append(self._automaton, sequence.tokens[self._reader.begin(sequence) :])

    def propose(self, budget: int, least: float = 0.0) -> DraftTree:
        if budget <= 0 or not self._automaton.size[TOKENS]:
            return EMPTY
        state = repeated_suffix(self._automaton)
        if self._automaton.lengths[state] < self._shortest:
            return EMPTY
        dice = at(self._dice, self._sequence.emitted)
        size = _grow(self._automaton, self._candidates, state, budget, MAX_DEPTH, dice)
        return draft_tree(self._candidates.nodes, size, budget)

    def observe(self, verdict: Verdict) -> None:
        append(self._automaton, verdict.tokens)

    def end(self) -> None:
        pass

    def state(self) -> State:
        return {"known": numbers(self._reader.known), **join(automaton=self._automaton._asdict())}

    def load(self, saved: State, text: Sequence) -> None:
        restore(self._automaton._asdict(), part(saved, "automaton"))
        self._reader.resume(text, int(array(saved, "known", np.float64, 1)[0]))


@native
def _grow(automaton: Automaton, candidates: Candidates, state: int, budget: int, depth: int, dice: Dice) -> int:
    """Marks the likeliest continuations of `state`, best first; a path's probability is the product of its shares."""
