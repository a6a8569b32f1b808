"""A corpus that is searched by what it goes on with: a suffix array, and ready counts for its frequent contexts.

All positions of a text, sorted by the (up to MAX_MATCH) tokens from there on. The occurrences of a context are a range; the
ranges of longer contexts lie inside it, and within a range the successors stand in order. Promises read-only
memory-mapped arrays; matches and continuations never cross documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from drafters import array_file
from drafters.kernel import allocating_kernel, kernel

KIND = "suffix"
MAX_MATCH = 16  # tokens; REST's longest
LONGEST_CONTEXT = 6  # tokens; frequent contexts up to here have their successors counted ahead
DENSE = 32  # a context with more occurrences is frequent
WIDTH = 16  # successors kept of a frequent context


class Corpus(NamedTuple):
    """One block of corpus. Documents are parted by `separator`, which is no token and larger than all of them."""

    tokens: NDArray[Any]  # uint16 or uint32 [T]
    order: NDArray[np.uint32]  # [T]; positions, sorted by the tokens from there on
    first: NDArray[np.int64]  # [separator + 2]; the range of each single token
    slots: NDArray[np.int64]  # [H]; open addressing: low * 8 + length of a frequent context's range, or -1
    slot_rows: NDArray[np.int32]  # [H]
    totals: NDArray[np.int64]  # [D]; occurrences that go on within their document
    kinds: NDArray[np.int32]  # [D]; distinct successors
    successors: NDArray[np.int32]  # [D, WIDTH]; most frequent first, -1 = none
    counts: NDArray[np.int32]  # [D, WIDTH]
    separator: int


def sort_suffixes(tokens: NDArray[Any]) -> NDArray[np.uint32]:
    """The order of `Corpus` for `tokens` (any integer [T]), by prefix doubling; ties keep their place in the text."""
    rank = tokens.astype(np.int64)  # rank of a position by its next 1, 2, 4 ... tokens
    size = len(rank)
    span = 1
    while True:
        rank = np.unique(rank, return_inverse=True)[1]
        if span == MAX_MATCH or size == 0 or rank.max() == size - 1:
            return np.argsort(rank, kind="stable").astype(np.uint32)
        later = np.full(size, -1, np.int64)
        later[:-span] = rank[span:]
        rank = rank * (size + 1) + later + 1
        span *= 2


def index(tokens: NDArray[Any], separator: int) -> Corpus:
    """Sorts a block of text (any integer [T], `separator` before each document) and counts its frequent contexts."""
    narrow_tokens = tokens.astype(np.uint16 if separator < 1 << 16 else np.uint32)
    order = sort_suffixes(tokens)
    first = np.zeros(separator + 2, np.int64)
    first[1:] = np.cumsum(np.bincount(tokens, minlength=separator + 1))
    empty = np.zeros(0, np.int64)
    rows = np.zeros((0, WIDTH), np.int32)
    bare = Corpus(
        narrow_tokens, order, first, empty, empty.astype(np.int32), empty, empty.astype(np.int32), rows, rows, separator
    )
    found = _count_frequent(bare, False)
    table = 1 << (2 * found + 1).bit_length()
    corpus = bare._replace(
        slots=np.full(table, -1, np.int64),
        slot_rows=np.zeros(table, np.int32),
        totals=np.zeros(found, np.int64),
        kinds=np.zeros(found, np.int32),
        successors=np.full((found, WIDTH), -1, np.int32),
        counts=np.zeros((found, WIDTH), np.int32),
    )
    _count_frequent(corpus, True)
    for array in corpus[:-1]:
        array.setflags(write=False)  # as a mapped file's arrays are: one version of the kernels serves both
    return corpus


def release(corpora: Sequence[Corpus]) -> None:
    """Gives back the memory that mapped blocks take, for the end of a request.

    The kernel maps many pages around each one that is touched, so a long answer may make much of a datastore resident.
    """
    for corpus in corpora:
        array_file.release(corpus.tokens)


@kernel
def _token(corpus: Corpus, place: int, length: int) -> np.int64 | int:
    """The token that stands `length` after the start of the suffix at `place` in the order; -1 beyond the text."""
    position = np.int64(corpus.order[place]) + length
    return np.int64(corpus.tokens[position]) if 0 <= position < len(corpus.tokens) else -1


@kernel
def narrow(corpus: Corpus, low: int, high: int, length: int, token: int) -> tuple[int, int]:
    """The part of the range [low, high) of a context of `length` tokens where it goes on with `token`."""
    if length == 0:
        return (corpus.first[token], corpus.first[token + 1]) if 0 <= token < corpus.separator else (0, 0)
    a, b = low, high
    while a < b:
        middle = (a + b) >> 1
        if _token(corpus, middle, length) < token:
            a = middle + 1
        else:
            b = middle
    start, step = a, 1
    while a + step < high and _token(corpus, a + step, length) <= token:
        step *= 2
    b = min(high, a + step)
    while a < b:
        middle = (a + b) >> 1
        if _token(corpus, middle, length) <= token:
            a = middle + 1
        else:
            b = middle
    return start, a


@kernel
def _home(corpus: Corpus, low: int, length: int) -> np.int64:
    mixed = np.uint64(low * 8 + length) * np.uint64(0x9E3779B97F4A7C15)
    return np.int64((mixed >> np.uint64(30)) & np.uint64(len(corpus.slots) - 1))


@kernel
def frequent_row(corpus: Corpus, low: int, length: int) -> int:
    """The row of the frequent context whose range begins at `low`; -1 where there is none."""
    slot = _home(corpus, low, length)
    while corpus.slots[slot] >= 0:
        if corpus.slots[slot] == low * 8 + length:
            return corpus.slot_rows[slot]
        slot = (slot + 1) & (len(corpus.slots) - 1)
    return -1


@allocating_kernel
def _count_frequent(corpus: Corpus, write: bool) -> int:
    """Walks all frequent contexts, shorter before longer; returns how many, and writes their rows where asked."""
    tokens = np.empty(corpus.separator + 1, np.int64)
    counts = np.empty(corpus.separator + 1, np.int64)
    stack = [(0, len(corpus.order), 0)]
    rows = 0
    while len(stack):
        low, high, length = stack.pop()
        kinds, i = 0, low
        while i < high:
            token = _token(corpus, i, length)
            _, end = narrow(corpus, i, high, length, token) if length and token >= 0 else (i, _run(corpus, i, high, length))
            if 0 <= token < corpus.separator:
                tokens[kinds], counts[kinds] = token, end - i
                kinds += 1
                if end - i > DENSE and length < LONGEST_CONTEXT:
                    stack.append((i, end, length + 1))
            i = end
        if write:
            _write_row(corpus, rows, low, length, tokens[:kinds], counts[:kinds])
        rows += 1
    return rows


@kernel
def _run(corpus: Corpus, low: int, high: int, length: int) -> int:
    """Where the run of equal tokens that begins at `low` ends."""
    token = _token(corpus, low, length)
    if length == 0:
        return corpus.first[token + 1]
    end = low + 1
    while end < high and _token(corpus, end, length) == token:
        end += 1
    return end


@allocating_kernel
def _write_row(corpus: Corpus, row: int, low: int, length: int, tokens: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
    slot = _home(corpus, low, length)
    while corpus.slots[slot] >= 0:
        slot = (slot + 1) & (len(corpus.slots) - 1)
    corpus.slots[slot], corpus.slot_rows[slot] = low * 8 + length, row
    corpus.totals[row], corpus.kinds[row] = counts.sum(), len(tokens)
    best = np.argsort(-counts, kind="mergesort")  # of equals, the smaller token first
    for i in range(min(len(tokens), WIDTH)):
        corpus.successors[row, i], corpus.counts[row, i] = tokens[best[i]], counts[best[i]]


@kernel
def locate(corpus: Corpus, context: NDArray[np.int32], longest: int, shortest: int) -> tuple[int, int, int]:
    """The range of the longest ending of `context` that occurs, and that ending's length.

    Endings of `longest` down to `shortest` tokens count; (0, 0, 0) where none occurs.
    """
    for length in range(min(longest, len(context), MAX_MATCH), shortest - 1, -1):
        low, high = 0, len(corpus.order)
        for i in range(length):
            token = context[len(context) - length + i]
            low, high = narrow(corpus, low, high, i, token)
            if low >= high or token >= corpus.separator:
                low, high = 0, 0
                break
        if low < high:
            return low, high, length
    return 0, 0, 0
