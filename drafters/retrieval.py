"""`retrieval`: REST (arXiv 2311.08252). Drafts the continuations of the text's longest suffix that occurs in a corpus.

The continuations of all matches form a trie, whose most frequent paths are drafted. Reads datastores from disk; keeps only
match ranges per session.
"""

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from outrider.drafters.interface import EMPTY, NOTHING, Corpora, DraftTree, Ints, Sampling, Verdict
from outrider.drafters.native.library import native
from outrider.drafters.options import RetrievalOptions
from outrider.drafters.sequence import Sequence
from outrider.drafters.state import Stateless
from outrider.drafters.tables.dice import at, new_dice, throw, weigh_tree
from outrider.drafters.tables.nodes import choose_likeliest, draft_tree
from outrider.drafters.tables.suffix import MAX_MATCH, Corpus
from outrider.drafters.tables.trie import Trie, new_trie, restart

# At most this many matches are read per step, an even sample of all. REST reads up to 5000.
MAX_MATCHES = 128


class RetrievalDrafter(Stateless):
    """REST for one session over any number of corpus blocks. Implements `Drafter`."""

    def __init__(self, corpus: Collection[Corpus], options: RetrievalOptions) -> None:
        """Each request reads the blocks that `corpus` has when it begins; their number must not change."""
        self._corpus = corpus
        self._blocks: tuple[Corpus, ...] = ()  # blocks that the current request reads
        self._length = options.length
        self._trie = new_trie(2 + MAX_MATCHES * options.length if corpus else 2)
        self._low = np.zeros((len(corpus), MAX_MATCH + 1), np.int64)  # suffix ranges of the last 0, 1, 2 ... tokens
        self._high = np.zeros_like(self._low)
        self._sequence = Sequence()
        self._dice = new_dice()

    def begin(
        self, sequence: Sequence, prediction: Ints = NOTHING, sampling: Sampling | None = None, corpora: Corpora | None = None
    ) -> None:
        self._blocks = tuple(self._corpus if corpora is None else corpora)
        self._sequence, self._dice = sequence, throw(self._dice, sampling, sequence.tokens)
        self._low[:], self._high[:] = 0, 0
        self._read(sequence.tokens[-MAX_MATCH:])

    def propose(self, budget: int, least: float = 0.0) -> DraftTree:
        if budget <= 0 or not self._blocks:
            return EMPTY
        occurs = (self._high > self._low)[:, 1:].any(axis=0)
        size = 1
        for length in np.flatnonzero(occurs)[::-1].tolist():
            if (size := self._collect(1 + length)) > 1:
                break
        _weigh(self._trie, size)
        weigh_tree(at(self._dice, self._sequence.emitted), self._trie.nodes, size, self._trie.scratch)
        choose_likeliest(self._trie.nodes, size, budget)
        return draft_tree(self._trie.nodes, size, budget)

    def observe(self, verdict: Verdict) -> None:
        self._read(verdict.tokens)

    def end(self) -> None:
        self._blocks = ()

    def _collect(self, match: int) -> int:
        """Fills the trie with the continuations of the last `match` tokens; returns its size, 1 if there are none."""
        low, high = self._low[:, match], self._high[:, match]
        stride = max(1, -(-int((high - low).sum()) // MAX_MATCHES))  # spreads the matches over all blocks
        restart(self._trie)
        size = 1
        for block, start, end in zip(self._blocks, low.tolist(), high.tolist(), strict=True):
            size = insert(self._trie, size, block, start, end, match, stride, self._length)
        return size

    def _read(self, tokens: Ints) -> None:
        for block, low, high in zip(self._blocks, self._low, self._high, strict=True):
            _read(block, tokens, low, high)


@native
def insert(trie: Trie, size: int, corpus: Corpus, low: int, high: int, match: int, stride: int, length: int) -> int:
    """Adds the continuation of every `stride`-th match (of `match` tokens) in [low, high), within its document."""


@native
def _read(corpus: Corpus, tokens: NDArray[np.int32], low: NDArray[np.int64], high: NDArray[np.int64]) -> None:
    """Updates the ranges of a text's last 0, 1, 2 ... tokens for more tokens."""


@native
def _weigh(trie: Trie, size: int) -> None:
    """Sets each path's probability to its share of the continuations, with add-one smoothing for unseen ones."""
