"""A corpus that is searched by what came before: the index of REST (arXiv 2311.08252).

All positions of a text, sorted by the tokens before them read backwards (a suffix array of the reversed text, cut at
MAX_MATCH tokens). So the places that share the longest ending with a context stand together, and shorter endings are
wider ranges around them. Promises read-only memory-mapped arrays; continuations and matches never cross documents.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

KIND = "suffix"
MAX_MATCH = 16  # tokens; REST's longest


class CorpusArrays(NamedTuple):
    """One block of corpus. Documents are parted by `separator`, which is no token."""

    tokens: NDArray[Any]  # uint16 or uint32 [T]
    order: NDArray[np.uint32]  # [T]; positions, sorted by the tokens before them, last one first
    separator: int


def sort_positions(tokens: NDArray[Any]) -> NDArray[np.uint32]:
    """The order of `CorpusArrays` for `tokens` (any integer [T]), by prefix doubling; ties keep their place in the text."""
    size = len(tokens)
    rank = np.empty(size, np.int64)  # rank of a position by its last 1, 2, 4 ... tokens
    rank[1:] = tokens[:-1]
    rank[:1] = -1
    span = 1
    while True:
        rank = np.unique(rank, return_inverse=True)[1]
        if span == MAX_MATCH or size == 0 or rank.max() == size - 1:
            return np.argsort(rank, kind="stable").astype(np.uint32)
        earlier = np.full(size, -1, np.int64)
        earlier[span:] = rank[:-span]
        rank = rank * (size + 1) + earlier + 1
        span *= 2


@njit(cache=True, nogil=True)
def _compare(corpus: CorpusArrays, position: int, context: NDArray[np.int32], length: int) -> tuple[int, int]:
    """Sign of (what stands before `position`) against the last `length` tokens of `context`, and how many agree."""
    for i in range(length):
        if position - 1 - i < 0:
            return -1, i
        here = np.int64(corpus.tokens[position - 1 - i])
        wanted = np.int64(context[len(context) - 1 - i])
        if here != wanted:
            return (-1 if here < wanted else 1), i
    return 0, length


@njit(cache=True, nogil=True)
def _bound(corpus: CorpusArrays, context: NDArray[np.int32], length: int, upper: bool, low: int, high: int) -> int:
    """First index in [low, high] whose text is not below (`upper`: above) the context's last `length` tokens."""
    while low < high:
        middle = (low + high) >> 1
        sign, _ = _compare(corpus, np.int64(corpus.order[middle]), context, length)
        if sign < 0 or (upper and sign == 0):
            low = middle + 1
        else:
            high = middle
    return low


@njit(cache=True, nogil=True)
def locate(corpus: CorpusArrays, context: NDArray[np.int32], longest: int, shortest: int) -> tuple[int, int, int]:
    """The range [low, high) of `order` that shares the longest ending with `context`, and that ending's length.

    Endings of `longest` down to `shortest` tokens count; (0, 0, 0) where none matches.
    """
    length = min(longest, len(context), MAX_MATCH)
    size = len(corpus.order)
    at = _bound(corpus, context, length, False, 0, size)
    match = 0
    for neighbour in (at - 1, at):
        if 0 <= neighbour < size:
            _, agree = _compare(corpus, np.int64(corpus.order[neighbour]), context, length)
            match = max(match, agree)
    if match < shortest:
        return 0, 0, 0
    low = _bound(corpus, context, match, False, 0, min(at + 1, size))
    high = _bound(corpus, context, match, True, max(at - 1, 0), size)
    return low, high, match
