"""`lookahead`: Jacobi iterations inside the verification forward (Lookahead Decoding, arXiv 2402.02057).

A window of guesses hangs below the last committed token: a chain of `window` guesses for the next positions, and below
each of them the refinements of the last `ngram` - 2 steps. That is an ordinary draft tree; the target's own choice at the
last refinement of each column is the next one, and the columns' n-grams fill a pool that drafts come from. Window
nodes are guesses like any others: one that the target happens to choose is emitted, since it is then the right token.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from drafters.interface import EMPTY, NOTHING, DraftTree, Ints, Sampling, Source, Verdict
from drafters.options import LookaheadOptions
from drafters.tables.nodes import lay_out
from drafters.tables.trie import child, new_trie, restart

GUESS_SHARE, WINDOW_SHARE = 0.6, 0.3  # of a path's probability that goes on: guesses are worth more than window nodes
POOL_TOKENS = 4096  # first tokens that the pool knows; the least recently used goes first


class LookaheadDrafter:
    """Lookahead for one session. Implements `Drafter`; needs the verdicts' top-1 at every node."""

    feedback = 1

    def __init__(self, options: LookaheadOptions) -> None:
        self._options = options
        self._pool: OrderedDict[int, list[tuple[int, ...]]] = OrderedDict()  # first token -> what followed, newest last
        self._trie = new_trie(2 + (options.window + options.guesses) * options.ngram)
        self._levels: list[Ints] = []  # each int32 [W]; level 0 first
        self._text = NOTHING  # the last `ngram` committed tokens
        self._tree = EMPTY
        self._last_level: NDArray[np.int32] = NOTHING  # rows of `_tree` that hold the last level, by column

    def begin(self, prompt: Ints, prediction: Ints = NOTHING, sampling: Sampling | None = None) -> None:
        random = np.random.default_rng(self._options.seed)
        self._levels = [random.choice(np.asarray(prompt, np.int32), self._options.window)]
        self._text = NOTHING
        self._commit(np.asarray(prompt, np.int32), learn=self._options.pool_from_prompt)

    def propose(self, budget: int) -> DraftTree:
        restart(self._trie)
        size = 1
        for followers in reversed(self._pool.get(int(self._text[-1]), [])):  # the newest guess first
            size = self._hang(0, followers, size, GUESS_SHARE)[1]
        last_level = []
        spine = 0
        for column, token in enumerate(self._levels[0].tolist()):
            spine, size = self._hang(spine, (token,), size, WINDOW_SHARE)
            refinements = tuple(int(level[column]) for level in self._levels[1:])
            node, size = self._hang(spine, refinements, size, WINDOW_SHARE)
            last_level.append(node)
        self._trie.nodes.chosen[1:size] = True
        self._tree, rows = lay_out(self._trie.nodes, size, budget)
        row_of = {node: row for row, node in enumerate(rows.tolist())}
        self._last_level = np.array([row_of.get(node, -1) for node in last_level], np.int32)
        return self._tree

    def observe(self, verdict: Verdict) -> None:
        self._commit(verdict.tokens, learn=True)
        # A tree that was cut on the way, or whose window did not fit, teaches nothing.
        if verdict.tree is self._tree and len(verdict.topk_ids) and np.all(self._last_level >= 0):
            self._refine(verdict.topk_ids[self._last_level + 1, 0])

    def end(self) -> None:
        self._levels = []

    def _hang(self, node: int, tokens: tuple[int, ...], size: int, share: float) -> tuple[int, int]:
        """Hangs a chain of `tokens` below `node`, where it is not there yet; returns its end and the trie's new size."""
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

    def _commit(self, tokens: Ints, learn: bool) -> None:
        n = self._options.ngram
        text = np.concatenate([self._text, tokens]).tolist()
        if learn:
            for end in range(max(n, len(self._text) + 1), len(text) + 1):
                self._remember(text[end - n], tuple(text[end - n + 1 : end]))
        self._text = np.array(text[-n:], np.int32)

    def _remember(self, first: int, followers: tuple[int, ...]) -> None:
        known = self._pool.setdefault(first, [])
        if followers in known:
            known.remove(followers)
        known.append(followers)
        del known[: -self._options.guesses]
        self._pool.move_to_end(first)
        if len(self._pool) > POOL_TOKENS:
            self._pool.popitem(last=False)
