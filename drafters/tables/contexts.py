"""Contexts: where the committed text, and each draft node after it, stands in every source that predicts tokens."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.drafters.kernel import kernel
from outrider.drafters.tables.base_table import BaseArrays
from outrider.drafters.tables.history import COPY_STATE, History, extend_hashes, follow_copy
from outrider.drafters.tables.learned_table import LearnedRows
from outrider.drafters.tables.suffix import LONGEST_CONTEXT, Corpus, follow

# Contexts have 0 to LONGEST_CONTEXT tokens.
LENGTHS = LONGEST_CONTEXT + 1


class Sources(NamedTuple):
    """The data that predictions are made from."""

    corpora: tuple[Corpus, ...]  # at least one while a request runs; may be empty texts
    history: History
    base: BaseArrays
    rows: LearnedRows
    expected: NDArray[np.int32]  # [M+1]; the length M of the client's prediction, then its tokens
    hits: NDArray[np.float64]  # [BUCKETS]; trust = hits / tries
    tries: NDArray[np.float64]  # [BUCKETS]
    boost: NDArray[np.float64]  # [CELLS]; read-only

    def __deepcopy__(self, memo: dict[int, Any]) -> Sources:
        """A copy of what the session has learned. It shares the boost: a copy of it would be writable, and kernels are
        specialised on that.
        """
        return Sources._make([*copy.deepcopy(self[:-1], memo), self.boost])


class Contexts(NamedTuple):
    """The position of each context in each source. Row 0 is the committed text; further rows are draft nodes."""

    low: NDArray[np.int64]  # [N, corpora, LENGTHS]; suffix-array ranges of the last 0, 1, 2 ... tokens
    high: NDArray[np.int64]  # [N, corpora, LENGTHS]
    hashes: NDArray[np.uint64]  # [N, LENGTHS]; of the last 0, 1, 2 ... tokens
    last: NDArray[np.int64]  # [N, 2 + COPY_STATE]; the last two tokens, -1 = none, and the copy (one array: see `History`)
    expected: NDArray[np.int32]  # [N, 2]; index into `Sources.expected`, 0 = not aligned; tokens matched in a row


def new_contexts(size: int, corpora: int) -> Contexts:
    """Room for `size` contexts."""
    return Contexts(
        low=np.zeros((size, corpora, LENGTHS), np.int64),
        high=np.zeros((size, corpora, LENGTHS), np.int64),
        hashes=np.zeros((size, LENGTHS), np.uint64),
        last=np.full((size, 2 + COPY_STATE), -1, np.int64),
        expected=np.zeros((size, 2), np.int32),
    )


@kernel
def advance(sources: Sources, contexts: Contexts, source: int, token: int, target: int) -> None:
    """Makes row `target` the context of row `source` followed by `token`; both may be the same row.

    Row 0 takes tokens that are in the history.
    """
    low, high = contexts.low, contexts.high
    for c in range(len(sources.corpora)):
        follow(sources.corpora[c], low[source, c], high[source, c], token, low[target, c], high[target, c])
    extend_hashes(contexts.hashes[source], token, contexts.hashes[target])
    follow_copy(
        sources.history, contexts.last[source, 2:], contexts.last[source, 1], token, contexts.last[target, 2:], target == 0
    )
    contexts.last[target, 0], contexts.last[target, 1] = contexts.last[source, 1], token
    index, run = contexts.expected[source, 0], contexts.expected[source, 1]
    agrees = 0 < index <= sources.expected[0] and sources.expected[index] == token
    contexts.expected[target, 0] = index + 1 if agrees else 0
    contexts.expected[target, 1] = run + 1 if agrees else 0


@kernel
def enter(sources: Sources, contexts: Contexts, ending: NDArray[np.int32]) -> None:
    """Sets context row 0 to a text that ends with `ending`, without learning from it."""
    contexts.low[0] = 0
    contexts.high[0] = 0
    contexts.hashes[0] = 0
    contexts.last[0] = -1
    contexts.expected[0] = 0
    for c in range(len(sources.corpora)):
        contexts.high[0, c, 0] = sources.corpora[c].size
    for token in ending:
        advance(sources, contexts, 0, token, 0)
