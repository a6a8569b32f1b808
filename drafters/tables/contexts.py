"""Contexts: where the committed text, and each draft node after it, stands in every source that predicts tokens."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.drafters.native.library import native, structure, zeros
from outrider.drafters.tables.base_table import BaseArrays
from outrider.drafters.tables.history import COPY_STATE, History
from outrider.drafters.tables.learned_table import LearnedRows
from outrider.drafters.tables.suffix import LONGEST_CONTEXT, Corpus

# Contexts have 0 to LONGEST_CONTEXT tokens.
LENGTHS = LONGEST_CONTEXT + 1


@structure
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


@structure
class Contexts(NamedTuple):
    """The position of each context in each source. Row 0 is the committed text; further rows are draft nodes."""

    low: NDArray[np.int64]  # [N, corpora, LENGTHS]; suffix-array ranges of the last 0, 1, 2 ... tokens
    high: NDArray[np.int64]  # [N, corpora, LENGTHS]
    hashes: NDArray[np.uint64]  # [N, LENGTHS]; of the last 0, 1, 2 ... tokens
    last: NDArray[np.int64]  # [N, 2 + COPY_STATE]; the last two tokens, -1 = none, and the copy
    expected: NDArray[np.int32]  # [N, 2]; index into `Sources.expected`, 0 = not aligned; tokens matched in a row


def new_contexts(size: int, corpora: int) -> Contexts:
    last = np.full((size, 2 + COPY_STATE), -1, np.int64)
    return zeros(Contexts, (size, corpora, LENGTHS), hashes=(size, LENGTHS), last=last, expected=(size, 2))


@native
def advance(sources: Sources, contexts: Contexts, source: int, token: int, target: int) -> None:
    """Makes row `target` the context of row `source` followed by `token`; both may be the same row.

    Row 0 takes tokens that are in the history.
    """


@native
def enter(sources: Sources, contexts: Contexts, ending: NDArray[np.int32]) -> None:
    """Sets context row 0 to a text that ends with `ending`, without learning from it."""
