"""`lookup`: copies on from where the session's own text said the same before.

By default from the longest repeated ending (a suffix automaton, O(1) per token); plain n-gram prompt lookup, which scans
the text for its last n tokens, is there to compare with.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from drafters.interface import EMPTY, NOTHING, DraftTree, Ints, Sampling, Source, Verdict, chain, common_prefix
from drafters.options import LookupOptions
from drafters.tables.automaton import TOKENS, Automaton, append, new_automaton, repeated_ending
from drafters.tables.kernel import kernel
from drafters.tables.nodes import Nodes, draft_tree, new_nodes, reset


class LookupDrafter:
    """Lookup for one session. Implements `Drafter`."""

    feedback = 0

    def __init__(self, options: LookupOptions) -> None:
        self._options = options
        self._automaton = new_automaton(options.capacity)
        self._seen = NOTHING  # all committed tokens of the session's last request
        self._nodes = new_nodes(1 + 64 * 16)
        self._states = np.zeros(len(self._nodes.tokens), np.int32)

    def begin(self, prompt: Ints, prediction: Ints = NOTHING, sampling: Sampling | None = None) -> None:
        prompt = np.asarray(prompt, np.int32)
        # A conversation's next prompt repeats what is known already.
        append(self._automaton, prompt[common_prefix(self._seen, prompt) :])
        self._seen = prompt

    def propose(self, budget: int) -> DraftTree:
        chosen = self._options
        if budget <= 0 or not self._automaton.size[TOKENS]:
            return EMPTY
        if chosen.match == "ngram":
            return self._copy(find_ngram(self._text(), chosen.ngram), budget)
        state = repeated_ending(self._automaton)
        if self._automaton.lengths[state] < chosen.shortest:
            return EMPTY
        if chosen.continuation == "recent":
            return self._copy(int(self._automaton.recent[state]), budget)
        branching = chosen.continuation == "tree"
        size = _grow(self._automaton, self._nodes, self._states, state, budget, chosen.length, branching)
        return draft_tree(self._nodes, size, budget)

    def observe(self, verdict: Verdict) -> None:
        append(self._automaton, verdict.tokens)
        self._seen = np.concatenate([self._seen, verdict.tokens])

    def end(self) -> None:
        pass

    def _text(self) -> Ints:
        return self._automaton.text[: self._automaton.size[TOKENS]]

    def _copy(self, start: int, budget: int) -> DraftTree:
        """The text from `start` on, as a chain; empty for a negative start."""
        if start < 0:
            return EMPTY
        tokens = self._text()[start : start + min(budget, self._options.length)]
        return chain(tokens, np.float32(0.8) ** np.arange(1, len(tokens) + 1, dtype=np.float32), Source.LOOKUP)


def find_ngram(text: Ints, longest: int) -> int:
    """Where the latest earlier occurrence of the text's last n tokens ends, for n from `longest` down to 1; or -1."""
    for n in range(min(longest, len(text) - 1), 0, -1):
        windows = np.lib.stride_tricks.sliding_window_view(text[:-1], n)
        found = np.flatnonzero((windows == text[len(text) - n :]).all(1))
        if len(found):
            return int(found[-1]) + n
    return -1


@kernel
def _grow(
    automaton: Automaton, nodes: Nodes, states: NDArray[np.int32], state: int, budget: int, depth: int, branching: bool
) -> int:
    """Marks the likeliest continuations of `state`, best first; a path's probability is the product of its shares."""
    reset(nodes, 0)
    states[0] = state
    size = _expand(automaton, nodes, states, 0, 1, branching)
    for _ in range(budget):
        best = -1
        for node in range(1, size):
            if not nodes.chosen[node] and (best < 0 or nodes.path[best] < nodes.path[node]):
                best = node
        if best < 0:
            break
        nodes.chosen[best] = True
        if nodes.depths[best] < depth:
            size = _expand(automaton, nodes, states, best, size, branching)
    return size


@kernel
def _expand(automaton: Automaton, nodes: Nodes, states: NDArray[np.int32], node: int, size: int, branching: bool) -> int:
    """Appends the successors of the node's state, or the most frequent one alone; returns the new size."""
    total = 1.0  # the mass of what was never seen here
    first, best = size, size
    edge = automaton.first_edge[states[node]]
    while edge >= 0 and size < len(nodes.tokens):
        target = automaton.edge_state[edge]
        count = max(1, automaton.counts[target])
        total += count
        nodes.tokens[size] = automaton.edge_token[edge]
        nodes.parents[size] = node
        nodes.depths[size] = nodes.depths[node] + 1
        nodes.path[size] = nodes.path[node] * count
        nodes.source[size] = Source.LOOKUP
        nodes.chosen[size] = False
        states[size] = target
        if nodes.path[size] > nodes.path[best]:
            best = size
        size += 1
        edge = automaton.edge_next[edge]
    if not branching and size > first:
        nodes.tokens[first], nodes.path[first], states[first] = nodes.tokens[best], nodes.path[best], states[best]
        size = first + 1
    for child in range(first, size):
        nodes.path[child] /= total
    return size
