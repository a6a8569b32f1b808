"""A corpus that is searched by what it goes on with: a suffix array, and ready counts for its frequent contexts.

All positions of a text, sorted by the (up to MAX_MATCH) tokens from there on. The occurrences of a context are a range; the
ranges of longer contexts lie inside it, and within a range the successors stand in order. Matches and continuations never
cross documents.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from drafters.options import MAX_MATCH
from drafters.tables.kernel import allocating_kernel, kernel
from drafters.tables.pages import Pages, in_memory, word

KIND = "suffix"
LONGEST_CONTEXT = 6  # tokens; frequent contexts up to here have their successors counted ahead
DENSE = 32  # a context with more occurrences is frequent
WIDTH = 16  # successors kept of a frequent context
NONE = (1 << 32) - 1
DISTINCT, TOTAL, SUCCESSORS = 0, 1, 2  # where they stand in a row
ROW = SUCCESSORS + 3 * WIDTH


class Corpus(NamedTuple):
    """One block of corpus as the kernels read it: arrays of 32-bit words (of tokens, maybe of 16 bits) one behind another.

    Documents are parted by `separator`, which is no token and larger than all of them. The arrays: `tokens` [T]; `order` [T],
    positions sorted by the tokens from there on; `first` [separator + 2], the range of each single token; `slots` [H, 2], open
    addressing: where a frequent context's range begins, and its row * 8 + its length, or twice NONE; `rows` [D, ROW], of a
    frequent context: distinct successors, occurrences that go on within their document, then the WIDTH most frequent
    successors, each with its count and where its range begins, NONE for none.
    """

    pages: Pages
    size: int  # T
    separator: int
    narrow: int  # 1 = two tokens to a word
    slot_count: int  # H, a power of two
    tokens: int  # the word where the array begins
    order: int
    first: int
    slots: int
    rows: int


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


def tabulate(tokens: NDArray[Any], separator: int) -> dict[str, NDArray[Any]]:
    """Sorts a block of text (any integer [T], `separator` before each document) and counts its frequent contexts.

    Returns the arrays of `Corpus`.
    """
    first = np.zeros(separator + 2, np.uint32)
    first[1:] = np.cumsum(np.bincount(tokens, minlength=separator + 1))
    arrays: dict[str, NDArray[Any]] = {
        "tokens": tokens.astype(np.uint16 if separator < 1 << 16 else np.uint32),
        "order": sort_suffixes(tokens),
        "first": first,
        "slots": np.full((1, 2), NONE, np.uint32),
        "rows": np.zeros((0, ROW), np.uint32),
    }
    bare = corpus_of(*in_memory(arrays), arrays, separator)
    found = _count_frequent(bare, arrays["slots"], arrays["rows"])
    arrays["slots"] = np.full((1 << (2 * found + 1).bit_length(), 2), NONE, np.uint32)
    arrays["rows"] = np.full((found, ROW), NONE, np.uint32)
    _count_frequent(bare, arrays["slots"], arrays["rows"])
    return arrays


def corpus_of(pages: Pages, places: Mapping[str, int], arrays: Mapping[str, NDArray[Any]], separator: int) -> Corpus:
    """A block whose `arrays` stand in `pages`, each from the word on that `places` gives."""
    tokens = arrays["tokens"]
    sizes = (len(tokens), separator, int(tokens.itemsize == 2), len(arrays["slots"]))
    return Corpus(pages, *sizes, *(places[name] for name in ("tokens", "order", "first", "slots", "rows")))


def index(tokens: NDArray[Any], separator: int) -> Corpus:
    """A block in memory of a text (any integer [T], `separator` before each document)."""
    arrays = tabulate(tokens, separator)
    return corpus_of(*in_memory(arrays), arrays, separator)


@kernel
def token_at(corpus: Corpus, position: int) -> int:
    """The text's token at `position`; -1 beyond the text."""
    if not 0 <= position < corpus.size:
        return -1
    if not corpus.narrow:
        return word(corpus.pages, corpus.tokens + position)
    return (word(corpus.pages, corpus.tokens + (position >> 1)) >> (16 * (position & 1))) & 0xFFFF


@kernel
def position_at(corpus: Corpus, place: int) -> int:
    """The position that stands at `place` in the order."""
    return word(corpus.pages, corpus.order + place)


@kernel
def _token(corpus: Corpus, place: int, length: int) -> int:
    """The token that stands `length` after the start of the suffix at `place` in the order; -1 beyond the text."""
    return token_at(corpus, position_at(corpus, place) + length)


@kernel
def narrow(corpus: Corpus, low: int, high: int, length: int, token: int) -> tuple[int, int]:
    """The part of the range [low, high) of a context of `length` tokens where it goes on with `token`."""
    if length == 0:
        if not 0 <= token < corpus.separator:
            return 0, 0
        return word(corpus.pages, corpus.first + token), word(corpus.pages, corpus.first + token + 1)
    if high - low > DENSE and length <= LONGEST_CONTEXT:
        row = frequent_row(corpus, low, length)
        if row >= 0:
            found, start, end = _frequent_successor(corpus, row, token)
            if found:
                return start, end
    return _search(corpus, low, high, length, token)


@kernel
def _frequent_successor(corpus: Corpus, row: int, token: int) -> tuple[bool, int, int]:
    """Whether the row says where a frequent context goes on with `token`, and that range."""
    at = corpus.rows + row * ROW
    kinds = word(corpus.pages, at + DISTINCT)
    for entry in range(at + SUCCESSORS, at + SUCCESSORS + 3 * min(kinds, WIDTH), 3):
        if word(corpus.pages, entry) == token:
            start = word(corpus.pages, entry + 2)
            return True, start, start + word(corpus.pages, entry + 1)
    return kinds <= WIDTH, 0, 0


@kernel
def _search(corpus: Corpus, low: int, high: int, length: int, token: int) -> tuple[int, int]:
    """`narrow` by bisection."""
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
def follow(
    corpus: Corpus,
    low: NDArray[np.int64],
    high: NDArray[np.int64],
    token: int,
    next_low: NDArray[np.int64],
    next_high: NDArray[np.int64],
) -> None:
    """From the ranges of a text's last 0, 1, 2 ... tokens to those with `token` behind it; may be done in place."""
    for length in range(len(low) - 1, 0, -1):
        start, end = low[length - 1], high[length - 1]
        if token >= corpus.separator:  # a token that the corpus's tokenizer does not have
            start, end = 0, 0
        elif length == 1:
            start, end = 0, corpus.size
        if start < end:
            start, end = narrow(corpus, start, end, length - 1, token)
        next_low[length], next_high[length] = start, max(start, end)
    next_low[0], next_high[0] = 0, corpus.size


@kernel
def _home(low: int, length: int, slots: int) -> int:
    mixed = np.uint64(low * 8 + length) * np.uint64(0x9E3779B97F4A7C15)
    return int(np.int64((mixed >> np.uint64(30)) & np.uint64(slots - 1)))


@kernel
def frequent_row(corpus: Corpus, low: int, length: int) -> int:
    """The row of the frequent context whose range begins at `low`; -1 where there is none."""
    slot = _home(low, length, corpus.slot_count)
    for _ in range(corpus.slot_count):
        at = corpus.slots + 2 * slot
        start, row = word(corpus.pages, at), word(corpus.pages, at + 1)
        if row == NONE:
            return -1
        if start == low and row & 7 == length:
            return row >> 3
        slot = (slot + 1) & (corpus.slot_count - 1)
    return -1


@allocating_kernel
def _count_frequent(corpus: Corpus, slots: NDArray[np.uint32], rows: NDArray[np.uint32]) -> int:
    """Walks all frequent contexts, shorter before longer; returns how many, and writes their rows where there is room."""
    tokens = np.empty(corpus.separator + 1, np.int64)
    counts = np.empty(corpus.separator + 1, np.int64)
    starts = np.empty(corpus.separator + 1, np.int64)
    stack = [(0, corpus.size, 0)]
    found = 0
    while len(stack):
        low, high, length = stack.pop()
        kinds, i = 0, low
        while i < high:
            token = _token(corpus, i, length)
            _, end = _search(corpus, i, high, length, token) if length and token >= 0 else (i, _run(corpus, i, high, length))
            if 0 <= token < corpus.separator:
                tokens[kinds], counts[kinds], starts[kinds] = token, end - i, i
                kinds += 1
                if end - i > DENSE and length < LONGEST_CONTEXT:
                    stack.append((i, end, length + 1))
            i = end
        if len(rows):
            _write_row(slots, rows, found, low, length, tokens[:kinds], counts[:kinds], starts[:kinds])
        found += 1
    return found


@kernel
def _run(corpus: Corpus, low: int, high: int, length: int) -> int:
    """Where the run of equal tokens that begins at `low` ends."""
    token = _token(corpus, low, length)
    if length == 0:
        return word(corpus.pages, corpus.first + token + 1)
    end = low + 1
    while end < high and _token(corpus, end, length) == token:
        end += 1
    return end


@allocating_kernel
def _write_row(
    slots: NDArray[np.uint32],
    rows: NDArray[np.uint32],
    row: int,
    low: int,
    length: int,
    tokens: NDArray[np.int64],
    counts: NDArray[np.int64],
    starts: NDArray[np.int64],
) -> None:
    slot = _home(low, length, len(slots))
    while slots[slot, 1] != NONE:
        slot = (slot + 1) & (len(slots) - 1)
    slots[slot, 0], slots[slot, 1] = low, row * 8 + length
    rows[row, DISTINCT], rows[row, TOTAL] = len(tokens), counts.sum()
    best = np.argsort(-counts, kind="mergesort")  # of equals, the smaller token first
    for i in range(min(len(tokens), WIDTH)):
        entry = SUCCESSORS + 3 * i
        rows[row, entry], rows[row, entry + 1], rows[row, entry + 2] = tokens[best[i]], counts[best[i]], starts[best[i]]
