"""An online suffix automaton (Blumer et al., 1985) over a session's own text, in amortised O(1) per token.

The suffix link of the newest state leads to the longest suffix of the text that occurred before, so matches need not be
tracked from step to step. Memory is bounded: a full automaton is rebuilt from the newest half of its text.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.drafters.kernel import kernel

# This many suffix links are followed to record an occurrence; shorter strings keep their older record.
HOPS = 32


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
    automaton = Automaton(
        text=np.zeros(capacity, np.int32),
        size=np.zeros(4, np.int64),
        lengths=np.zeros(states, np.int32),
        links=np.zeros(states, np.int32),
        recent=np.zeros(states, np.int32),
        counts=np.zeros(states, np.int32),
        first_edge=np.zeros(states, np.int32),
        edge_next=np.zeros(edges, np.int32),
        edge_token=np.zeros(edges, np.int32),
        edge_state=np.zeros(edges, np.int32),
        table_key=np.zeros(table, np.uint64),
        table_edge=np.zeros(table, np.int32),
    )
    clear(automaton)
    return automaton


@kernel
def clear(automaton: Automaton) -> None:
    """Removes all text."""
    automaton.size[:] = 0
    automaton.size[STATES] = 1
    automaton.links[0] = -1
    automaton.lengths[0] = 0
    automaton.first_edge[0] = -1
    automaton.table_key[:] = 0


@kernel
def _slot(automaton: Automaton, state: int, token: int) -> np.int64:
    """The edge's slot in the hash table, or the free slot where it belongs."""
    key = (np.uint64(state) << np.uint64(32)) | np.uint64(token + 1)
    mask = np.uint64(len(automaton.table_key) - 1)
    slot = (key * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(20) & mask
    while automaton.table_key[slot] != 0 and automaton.table_key[slot] != key:
        slot = (slot + np.uint64(1)) & mask
    return np.int64(slot)


@kernel
def follow(automaton: Automaton, state: int, token: int) -> int:
    """The edge of `state` with `token`, or -1."""
    slot = _slot(automaton, state, token)
    return automaton.table_edge[slot] if automaton.table_key[slot] else -1


@kernel
def _add_edge(automaton: Automaton, state: int, token: int, target: int) -> None:
    """Adds an edge from `state` to `target`."""
    edge = automaton.size[EDGES]
    automaton.size[EDGES] += 1
    automaton.edge_token[edge] = token
    automaton.edge_state[edge] = target
    automaton.edge_next[edge] = automaton.first_edge[state]
    automaton.first_edge[state] = edge
    slot = _slot(automaton, state, token)
    automaton.table_key[slot] = (np.uint64(state) << np.uint64(32)) | np.uint64(token + 1)
    automaton.table_edge[slot] = edge


@kernel
def _new_state(automaton: Automaton, length: int) -> int:
    """Adds a state without edges; returns it."""
    state = automaton.size[STATES]
    automaton.size[STATES] += 1
    automaton.lengths[state] = length
    automaton.first_edge[state] = -1
    automaton.counts[state] = 0
    return state


@kernel
def _clone(automaton: Automaton, state: int, above: int, token: int) -> int:
    """Splits off the strings of `state` that `above` reaches with `token`; returns their new state."""
    twin = _new_state(automaton, automaton.lengths[above] + 1)
    automaton.links[twin] = automaton.links[state]
    automaton.recent[twin] = automaton.recent[state]
    automaton.counts[twin] = automaton.counts[state]
    edge = automaton.first_edge[state]
    while edge >= 0:
        _add_edge(automaton, twin, automaton.edge_token[edge], automaton.edge_state[edge])
        edge = automaton.edge_next[edge]
    automaton.links[state] = twin
    while above >= 0:
        edge = follow(automaton, above, token)
        if edge < 0 or automaton.edge_state[edge] != state:
            break
        automaton.edge_state[edge] = twin
        above = automaton.links[above]
    return twin


@kernel
def _extend(automaton: Automaton, token: int) -> None:
    """Appends one token without recording occurrences."""
    position = automaton.size[TOKENS]
    automaton.text[position] = token
    automaton.size[TOKENS] += 1
    state = _new_state(automaton, position + 1)
    above = automaton.size[NEWEST]
    while above >= 0 and follow(automaton, above, token) < 0:
        _add_edge(automaton, above, token, state)
        above = automaton.links[above]
    if above < 0:
        automaton.links[state] = 0
    else:
        target = automaton.edge_state[follow(automaton, above, token)]
        if automaton.lengths[target] != automaton.lengths[above] + 1:
            target = _clone(automaton, target, above, token)
        automaton.links[state] = target
    automaton.size[NEWEST] = state


@kernel
def _record(automaton: Automaton) -> None:
    """Records that the newest state's strings and their suffixes occur at the end of the text."""
    state = automaton.size[NEWEST]
    for _ in range(HOPS):
        if state <= 0:
            return
        automaton.recent[state] = automaton.size[TOKENS]
        automaton.counts[state] += 1
        state = automaton.links[state]


@kernel
def append(automaton: Automaton, tokens: NDArray[np.int32]) -> None:
    """Appends tokens, int32 [N]. A suffix is recorded once more text follows, so that it does not match itself."""
    for token in tokens:
        if automaton.size[TOKENS] == len(automaton.text):
            clear(automaton)
            for at in range(len(automaton.text) // 2, len(automaton.text)):  # each token is read before it is overwritten
                if automaton.size[TOKENS]:
                    _record(automaton)
                _extend(automaton, automaton.text[at])
        if automaton.size[TOKENS]:
            _record(automaton)
        _extend(automaton, token)


@kernel
def repeated_suffix(automaton: Automaton) -> int:
    """The state of the longest suffix of the text that occurred before; 0 if there is none."""
    return max(0, automaton.links[automaton.size[NEWEST]])
