"""The learned table of one session: successor weights per context, over a base table (ADED, Algorithm 2).

A row starts as the base table's distribution of its context. Emitted tokens raise its weights, and the target's
distributions at verified nodes are blended into it. Memory is bounded: the table uses open addressing and evicts the
least recently updated row of a short probe window. Results are deterministic.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.drafters.interface import Floats, Ints
from outrider.drafters.native.library import native, structure, zeros
from outrider.drafters.tables.base_table import BaseArrays

# The table's n-grams are bi-grams and tri-grams.
TABLE_ORDER = 3
# The successors that are stored per context (t in the paper).
SUCCESSORS = 12
# The target's likeliest tokens that are learned at every verified node, rejected ones included. Not in the paper.
FEEDBACK = 8


@structure
class LearnedRows(NamedTuple):
    """The session's rows. An empty slot has key 0; a used slot stores its context's key + 1."""

    keys: NDArray[np.uint64]  # [C], C a power of two
    stamps: NDArray[np.int64]  # [C]; time of the last update
    tokens: NDArray[np.int32]  # [C, S]; -1 = none
    weights: NDArray[np.float32]  # [C, S]; the base table's probabilities plus increments
    missing: NDArray[np.float32]  # [C]; weight of successors that are not in the row
    clock: NDArray[np.int64]  # [1]; number of updates


def new_rows(capacity: int, successors: int) -> LearnedRows:
    """Empty rows for `capacity` contexts (rounded up to a power of two) of `successors` tokens each."""
    size = 1 << max(4, (capacity - 1).bit_length())
    tokens, missing = np.full((size, successors), -1, np.int32), np.ones(size, np.float32)
    return zeros(LearnedRows, size, tokens=tokens, weights=(size, successors), missing=missing, clock=1)


@native
def learn(
    base: BaseArrays, rows: LearnedRows, text: NDArray[np.int32], fresh: int, order: int, increment: float, maximum: float
) -> None:
    """Raises all n-grams of 2 to `order` tokens that end in the last `fresh` tokens of `text`, int32 [T]."""


@native
def absorb(
    base: BaseArrays, rows: LearnedRows, text: Ints, tokens: Ints, parents: Ints, ids: Ints, probabilities: Floats, order: int
) -> None:
    """Blends the target's distribution at every node of a verified tree, rejected nodes included, into the rows.

    `text` is int32 [3], the last committed tokens (-1 = none); `tokens` and `parents` are the tree's, [N]; `ids` and
    `probabilities` are the target's likeliest tokens at the root and at each node, [N+1, K]. The longest context, of
    `order` - 1 tokens, takes the target's distribution; shorter contexts occur in many places and move half-way.
    """
