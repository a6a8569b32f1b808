"""`retrieval`: REST (arXiv 2311.08252). Drafts the continuations of the text's longest suffix that occurs in a corpus.

The continuations of all matches form a trie, whose most frequent paths are drafted. How far their frequencies can be trusted
is measured for each length of the match, so the node budget decides whether a short match is worth verifying. Reads datastores
from disk; keeps only match ranges and these measurements per session.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np

from outrider.drafters.interface import EMPTY, NOTHING, DraftTree, Ints, Sampling, Source, Verdict
from outrider.drafters.kernel import kernel
from outrider.drafters.options import MAX_MATCH, RetrievalOptions
from outrider.drafters.policy import Trust
from outrider.drafters.sequence import Sequence
from outrider.drafters.state import State, join, part
from outrider.drafters.tables.nodes import choose_likeliest, draft_tree
from outrider.drafters.tables.suffix import Corpus, follow, position_at, token_at
from outrider.drafters.tables.trie import Trie, child, new_trie, restart


class RetrievalDrafter:
    """REST for one session over any number of corpus blocks. Implements `Drafter`."""

    feedback = 0
    prunable = True

    def __init__(self, corpus: Collection[Corpus], options: RetrievalOptions) -> None:
        """Each request reads the blocks that `corpus` has when it begins; their number must not change."""
        self._corpus = corpus
        self._blocks: tuple[Corpus, ...] = ()  # blocks that the current request reads
        self._options = options
        self._trie = new_trie(2 + options.matches * options.length if corpus else 2)
        self._low = np.zeros((len(corpus), MAX_MATCH + 1), np.int64)  # suffix ranges of the last 0, 1, 2 ... tokens
        self._high = np.zeros_like(self._low)
        self._trust = [Trust() for _ in range(MAX_MATCH + 1)]  # trust by match length
        self._match = 0  # length of the last draft's match
        self._first: frozenset[int] = frozenset()  # that draft's candidates for the next token
        self._expected = 0.0  # the share of the continuations that begin with one of them

    def begin(self, sequence: Sequence, prediction: Ints = NOTHING, sampling: Sampling | None = None) -> None:
        self._blocks = tuple(self._corpus)
        self._low[:], self._high[:] = 0, 0
        self._read(sequence.tokens[-MAX_MATCH:])

    def propose(self, budget: int, least: float = 0.0) -> DraftTree:
        options = self._options
        self._first = frozenset()
        if budget <= 0 or not self._blocks:
            return EMPTY
        occurs = (self._high > self._low)[:, options.shortest : options.longest + 1].any(axis=0)
        size = 1
        for length in np.flatnonzero(occurs)[::-1].tolist():
            self._match = options.shortest + length
            if (size := self._collect(self._match)) > 1:
                break
        _weigh(self._trie, size)
        choose_likeliest(self._trie.nodes, size, budget)
        draft = draft_tree(self._trie.nodes, size, budget)
        self._first = frozenset(draft.tokens[draft.parents == -1].tolist())
        self._expected = float(draft.probability[draft.parents == -1].sum())
        return replace(draft, probability=draft.probability * np.float32(self._trust[self._match].factor))

    def observe(self, verdict: Verdict) -> None:
        self._read(verdict.tokens)
        if self._first:
            self._trust[self._match].record(self._expected, int(int(verdict.tokens[0]) in self._first))

    def end(self) -> None:
        self._blocks = ()

    def state(self) -> State:
        return join(**{f"trust.{length}": trust.state() for length, trust in enumerate(self._trust)})

    def load(self, saved: State, text: Sequence) -> None:
        for length, trust in enumerate(self._trust):
            trust.load(part(saved, f"trust.{length}"))

    def _collect(self, match: int) -> int:
        """Fills the trie with the continuations of the last `match` tokens; returns its size, 1 if there are none."""
        low, high = self._low[:, match], self._high[:, match]
        stride = max(1, -(-int((high - low).sum()) // self._options.matches))  # spreads the matches over all blocks
        restart(self._trie)
        size = 1
        for block, start, end in zip(self._blocks, low.tolist(), high.tolist(), strict=True):
            size = insert(self._trie, size, block, start, end, match, stride, self._options.length)
        return size

    def _read(self, tokens: Ints) -> None:
        for block, low, high in zip(self._blocks, self._low, self._high, strict=True):
            for token in tokens.tolist():
                follow(block, low, high, token, low, high)


@kernel
def insert(trie: Trie, size: int, corpus: Corpus, low: int, high: int, match: int, stride: int, length: int) -> int:
    """Adds the continuation of every `stride`-th match (of `match` tokens) in [low, high), within its document."""
    for i in range(low, high, stride):
        position = position_at(corpus, i) + match
        node = 0
        trie.counts[0] += 1
        for offset in range(length):
            token = token_at(corpus, position + offset)
            if token < 0 or token == corpus.separator or size == len(trie.counts):
                break
            node, size = child(trie, size, node, token, Source.RETRIEVAL)
            trie.counts[node] += 1
    return size


@kernel
def _weigh(trie: Trie, size: int) -> None:
    """Sets each path's probability to its share of the continuations, with add-one smoothing for unseen ones."""
    for node in range(1, size):
        trie.nodes.path[node] = trie.counts[node] / (trie.counts[0] + 1.0)
