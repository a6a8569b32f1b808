"""`lookahead`: Jacobi iterations inside the verification forward (Lookahead Decoding, arXiv 2402.02057).

A window of guesses is attached to the root: a chain of `window` guesses for the next positions, and below each of them its
refinements of the last `ngram` - 2 steps. The target's choice at the last refinement of each column is its next
refinement, and the columns' n-grams fill a pool from which continuations are drafted. Pool n-grams and window form an
ordinary draft tree: a window node that the target chooses is accepted like any other node.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from drafters.interface import EMPTY, NOTHING, DraftTree, Ints, Sampling, Source, Verdict
from drafters.options import LookaheadOptions
from drafters.sequence import Sequence
from drafters.tables.nodes import lay_out
from drafters.tables.trie import child, new_trie, restart

POOL_SHARE, WINDOW_SHARE = 0.6, 0.3  # factors of the path probability per token; pool n-grams are likelier
POOL_TOKENS = 4096  # first tokens in the pool; the least recently used is evicted


class LookaheadDrafter:
    """Lookahead for one session. Implements `Drafter`; learns from the target's top-1 token at every node."""

    feedback = 1
    prunable = False  # window nodes carry Jacobi state: each needs the target's choice

    def __init__(self, options: LookaheadOptions) -> None:
        self._options = options
        self._pool: OrderedDict[int, list[tuple[int, ...]]] = (
            OrderedDict()
        )  # first token to the rest of its n-grams, newest last
        self._trie = new_trie(2 + (options.window + options.guesses) * options.ngram)
        self._levels: list[Ints] = []  # each int32 [W]; level 0 first
        self._sequence = Sequence()
        self._tree = EMPTY
        self._last_level: NDArray[np.int32] = NOTHING  # rows of `_tree`, by column

    def begin(self, sequence: Sequence, prediction: Ints = NOTHING, sampling: Sampling | None = None) -> None:
        random = np.random.default_rng(self._options.seed)
        self._levels = [random.choice(sequence.tokens, self._options.window)]
        self._sequence = sequence
        if self._options.pool_from_prompt:
            self._learn(0)

    def propose(self, budget: int) -> DraftTree:
        restart(self._trie)
        size = 1
        for followers in reversed(self._pool.get(int(self._sequence.tokens[-1]), [])):  # newest first
            size = self._attach(0, followers, size, POOL_SHARE)[1]
        last_level = []
        spine = 0
        for column, token in enumerate(self._levels[0].tolist()):
            spine, size = self._attach(spine, (token,), size, WINDOW_SHARE)
            refinements = tuple(int(level[column]) for level in self._levels[1:])
            node, size = self._attach(spine, refinements, size, WINDOW_SHARE)
            last_level.append(node)
        self._trie.nodes.chosen[1:size] = True
        self._tree, rows = lay_out(self._trie.nodes, size, budget)
        row_of = {node: row for row, node in enumerate(rows.tolist())}
        self._last_level = np.array([row_of.get(node, -1) for node in last_level], np.int32)
        return self._tree

    def observe(self, verdict: Verdict) -> None:
        self._learn(len(self._sequence) - len(verdict.tokens))
        # A tree that was pruned, or whose window did not fit, gives no complete refinement.
        if verdict.tree is self._tree and len(verdict.topk_ids) and np.all(self._last_level >= 0):
            self._refine(verdict.topk_ids[self._last_level + 1, 0])

    def end(self) -> None:
        self._levels = []

    def _attach(self, node: int, tokens: tuple[int, ...], size: int, share: float) -> tuple[int, int]:
        """Adds a chain of `tokens` below `node`; returns its last node and the trie's new size."""
        path = self._trie.nodes.path
        for token in tokens:
            above, before = node, size
            node, size = child(self._trie, size, above, token, Source.LOOKAHEAD)
            if size > before:
                path[node] = path[above] * share
        return node, size

    def _refine(self, chosen: Ints) -> None:
        """One Jacobi step: the target's choices become the newest level; full columns become n-grams of the pool."""
        if len(self._levels) < self._options.ngram - 1:
            self._levels.append(chosen)
            return
        for column in range(self._options.window):
            gram = [int(level[column]) for level in self._levels]
            self._remember(gram[0], (*gram[1:], int(chosen[column])))
        self._levels = [*self._levels[1:], chosen]

    def _learn(self, start: int) -> None:
        """Adds the n-grams that end at position `start` or later to the pool."""
        n = self._options.ngram
        text = self._sequence.tokens[max(0, start - n + 1) :].tolist()
        for end in range(n, len(text) + 1):
            self._remember(text[end - n], tuple(text[end - n + 1 : end]))

    def _remember(self, first: int, followers: tuple[int, ...]) -> None:
        grams = self._pool.setdefault(first, [])
        if followers in grams:
            grams.remove(followers)
        grams.append(followers)
        del grams[: -self._options.guesses]
        self._pool.move_to_end(first)
        if len(self._pool) > POOL_TOKENS:
            self._pool.popitem(last=False)
