"""An online suffix automaton (Blumer et al., 1985) over a session's own text, in amortised O(1) per token.

The suffix link of the newest state leads to the longest suffix of the text that occurred before, so matches need not be
tracked from step to step. Memory is bounded: a full automaton is rebuilt from the newest half of its text.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.drafters.native.library import native, structure, zeros

# This many suffix links are followed to record an occurrence; shorter strings keep their older record.
HOPS = 32


@structure
class Automaton(NamedTuple):
    """State 0 is the empty string. Edges are in a linked list per state and in a hash table."""

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


TOKENS, STATES, EDGES, NEWEST = 0, 1, 2, 3


def new_automaton(capacity: int) -> Automaton:
    """Room for `capacity` tokens of text."""
    states, edges = 2 * capacity + 2, 3 * capacity + 4
    table = 1 << (2 * edges - 1).bit_length()
    of_edges = {"edge_next": edges, "edge_token": edges, "edge_state": edges, "table_key": table, "table_edge": table}
    automaton = zeros(Automaton, states, text=capacity, size=4, **of_edges)
    clear(automaton)
    return automaton


@native
def clear(automaton: Automaton) -> None:
    """Removes all text."""


@native
def follow(automaton: Automaton, state: int, token: int) -> int:
    """The edge of `state` with `token`, or -1."""


@native
def append(automaton: Automaton, tokens: NDArray[np.int32]) -> None:
    """Appends tokens, int32 [N]. A suffix is recorded once more text follows, so that it does not match itself."""


@native
def repeated_suffix(automaton: Automaton) -> int:
    """The state of the longest suffix of the text that occurred before; 0 if there is none."""
