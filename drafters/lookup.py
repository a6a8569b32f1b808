"""`lookup`: drafts the continuations of the longest repeated suffix of the session's text (a suffix automaton)."""

from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.drafters.interface import EMPTY, MAX_NODES, NOTHING, Corpora, DraftTree, Ints, Sampling, Verdict
from outrider.drafters.native.library import native, structure, zeros
from outrider.drafters.options import LookupOptions
from outrider.drafters.sequence import Reader, Sequence
from outrider.drafters.state import State, array, join, numbers, part, restore
from outrider.drafters.tables.dice import Dice, at, new_dice, throw
from outrider.drafters.tables.nodes import Nodes, draft_tree, new_nodes

# The longest continuation.
MAX_DEPTH = 16
# On average, this many candidates for each draft node fit into the search.
BRANCHES = 16
TOKENS = 0  # in `Automaton.size`


@structure
class Automaton(NamedTuple):
    """An online suffix automaton (Blumer et al., 1985) over a session's own text, in amortised O(1) per token.

    State 0 is the empty string. Edges are in a linked list per state and in a hash table. The suffix link of the newest state
    leads to the longest suffix of the text that occurred before, so matches need not be tracked from step to step. Memory is
    bounded: a full automaton is rebuilt from the newest half of its text.
    """

    text: NDArray[np.int32]  # [T]
    size: NDArray[np.int64]  # [4]: tokens, states, edges, the newest state
    lengths: NDArray[np.int32]  # [S]; length of the state's longest string in tokens
    links: NDArray[np.int32]  # [S]; suffix link: the state of the longest suffix that belongs to another state
    recent: NDArray[np.int32]  # [S]; position after the latest occurrence of the state's strings
    counts: NDArray[np.int32]  # [S]; number of their occurrences
    first_edge: NDArray[np.int32]  # [S]; -1 = none
    edge_next: NDArray[np.int32]  # [E]
    edge_token: NDArray[np.int32]  # [E]
    edge_state: NDArray[np.int32]  # [E]
    table_key: NDArray[np.uint64]  # [H]; 0 = free
    table_edge: NDArray[np.int32]  # [H]


def new_automaton(capacity: int) -> Automaton:
    """Room for `capacity` tokens of text."""
    states, edges = 2 * capacity + 2, 3 * capacity + 4
    table = 1 << (2 * edges - 1).bit_length()
    of_edges = {"edge_next": edges, "edge_token": edges, "edge_state": edges, "table_key": table, "table_edge": table}
    automaton = zeros(Automaton, states, text=capacity, size=4, **of_edges)
    clear(automaton)
    return automaton


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


@partial(native, module="automaton")
def clear(automaton: Automaton) -> None:
    """Removes all text."""


@partial(native, module="automaton")
def append(automaton: Automaton, tokens: NDArray[np.int32]) -> None:
    """Appends tokens, int32 [N]. A suffix is recorded once more text follows, so that it does not match itself."""


@partial(native, module="automaton")
def repeated_suffix(automaton: Automaton) -> int:
    """The state of the longest suffix of the text that occurred before; 0 if there is none."""
