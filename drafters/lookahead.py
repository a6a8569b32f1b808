"""`lookahead`: Jacobi iterations inside the verification forward (Lookahead Decoding, arXiv 2402.02057).

A window of guesses is attached to the root: a chain of `window` guesses for the next positions, and below each of them its
refinements of the last `ngram` - 2 steps. The target's choice at the last refinement of each column is its next
refinement, and the columns' n-grams fill a pool from which continuations are drafted. Pool n-grams and window form an
ordinary draft tree: a window node that the target chooses is accepted like any other node.

The rows of the window are reserved, and pool n-grams fill the others. Where the node budget does not hold both, both are
scaled by the same factor.
"""

from collections import OrderedDict

import numpy as np

from outrider.drafters.interface import EMPTY, NOTHING, Corpora, DraftTree, Ints, Sampling, Source, Verdict
from outrider.drafters.options import LookaheadOptions
from outrider.drafters.sequence import Sequence
from outrider.drafters.state import State, array, numbers
from outrider.drafters.tables.nodes import draft_tree
from outrider.drafters.tables.trie import child, new_trie, restart

# Each token multiplies the path probability by one of these factors; n-grams of the pool are likelier.
POOL_SHARE, WINDOW_SHARE = 0.6, 0.3
# The pool holds the n-grams of this many first tokens; the least recently used one is evicted.
POOL_TOKENS = 4096


class LookaheadDrafter:
    """Lookahead for one session. Implements `Drafter`; learns from the target's top-1 token at every node."""

    feedback = 1
    prunable = False  # window nodes carry Jacobi state: each needs the target's choice

    def __init__(self, options: LookaheadOptions) -> None:
        self._options = options
        self._pool: OrderedDict[int, list[tuple[int, ...]]] = (
            OrderedDict()
        )  # maps the first token to the rest of its n-grams, newest last
        self._trie = new_trie(2 + (options.window + options.guesses) * options.ngram)
        self._levels: list[Ints] = []  # int32 [columns] per level; level 0 first
        self._sequence = Sequence()
        self._proposed = False  # whether the window is part of the last draft
        self._refines = False  # whether the verifier reports the target's choices, without which no window is worth its rows

    def begin(
        self, sequence: Sequence, prediction: Ints = NOTHING, sampling: Sampling | None = None, corpora: Corpora | None = None
    ) -> None:
        self._levels = [np.random.default_rng(0).choice(sequence.tokens, self._options.window)]
        self._sequence = sequence
        self._learn(0)

    def propose(self, budget: int, least: float = 0.0) -> DraftTree:
        self._proposed = budget > 0
        if not self._proposed:
            return EMPTY
        room = len(self._trie.nodes.tokens)
        if self._refines:
            room = budget
            self._levels = [level[: self._columns(budget)] for level in self._levels]
        restart(self._trie)
        size = 1
        for column in range(self._width):
            size = self._attach(self._path(column), size, WINDOW_SHARE, room)
        for followers in reversed(self._pool.get(int(self._sequence.tokens[-1]), [])):  # newest first
            size = self._attach(followers, size, POOL_SHARE, room)
        self._trie.nodes.chosen[1:size] = True
        return draft_tree(self._trie.nodes, size, budget)

    def observe(self, verdict: Verdict) -> None:
        self._learn(len(self._sequence) - len(verdict.tokens))
        if not self._proposed:
            return
        self._refines = verdict.topk_ids.shape[-1] > 0
        # Tokens that a grammar forces replace the whole tree.
        if self._refines and Source.GRAMMAR not in verdict.tree.source:
            self._refine(verdict.tree, verdict.topk_ids[:, 0])

    def end(self) -> None:
        self._levels = []

    def state(self) -> State:
        grams = [(first, *followers) for first, known in self._pool.items() for followers in known]
        pool = np.array(grams, np.int32).reshape(-1, self._options.ngram)
        return {"pool": pool, "refines": numbers(self._refines)}

    def load(self, saved: State, text: Sequence) -> None:
        self._refines = bool(array(saved, "refines", np.float64, 1)[0])
        for first, *followers in array(saved, "pool", np.int32, None, self._options.ngram).tolist():
            self._pool.setdefault(first, []).append(tuple(followers))

    @property
    def _width(self) -> int:
        """The window's number of columns."""
        return len(self._levels[0]) if self._levels else 0

    def _columns(self, budget: int) -> int:
        """The columns whose refinements fit into the window's share of the budget; at least one, if the budget holds it."""
        rows = budget * self._options.window // (self._options.window + self._options.guesses)
        return max(rows // len(self._levels), int(budget >= len(self._levels)))

    def _path(self, column: int) -> tuple[int, ...]:
        """The tokens from the root to a column's newest refinement: the guesses up to the column, then its refinements."""
        guesses, *refinements = self._levels
        return (*guesses[: column + 1].tolist(), *(int(level[column]) for level in refinements))

    def _attach(self, tokens: tuple[int, ...], size: int, share: float, room: int) -> int:
        """Adds a chain of `tokens` below the root, as long as there is room; returns the trie's new size."""
        path, node = self._trie.nodes.path, 0
        for token in tokens:
            above, before = node, size
            node, size = child(self._trie, size, above, token, Source.LOOKAHEAD)
            if size > room + 1:
                return before
            path[node] = max(path[node] if size == before else 0.0, path[above] * share)
        return size

    def _refine(self, tree: DraftTree, choices: Ints) -> None:
        """One Jacobi step: the target's choices become the newest level; full columns become n-grams of the pool.

        `choices` are the target's at the root and at each node of the verified tree, int32 [N+1]. A grammar may have removed
        nodes: such a column continues with the choice at its deepest node that is left, and gives no n-gram.
        """
        full = len(self._levels) == self._options.ngram - 1
        chosen = np.empty(self._width, np.int32)
        for column in range(self._width):
            path = self._path(column)
            rows = tree.follow(np.array(path, np.int32))
            chosen[column] = choices[rows[-1] + 1 if len(rows) else 0]
            if full and len(rows) == len(path):
                first, *followers = (int(level[column]) for level in self._levels)
                self._remember(first, (*followers, int(chosen[column])))
        self._levels = [*self._levels[full:], chosen]

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
