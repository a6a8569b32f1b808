"""A corpus index: a suffix array, and precomputed successor counts of frequent contexts.

The suffix array sorts all positions of a text by the tokens that follow (up to MAX_MATCH). The occurrences of a context
are a range of it, the ranges of longer contexts are nested in it, and successors are sorted within a range. Matches and
continuations never cross documents.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.drafters.kernel import allocating_kernel, kernel
from outrider.drafters.options import MAX_MATCH
from outrider.drafters.tables.pages import Pages, in_memory, word

KIND = "suffix"
# The successors of frequent contexts of up to this many tokens are precomputed.
LONGEST_CONTEXT = 6
# A context with more occurrences is frequent.
DENSE = 32
# This many successors are stored for a frequent context.
WIDTH = 16
NONE = (1 << 32) - 1
DISTINCT, TOTAL, SUCCESSORS = 0, 1, 2
ROW = SUCCESSORS + 3 * WIDTH


class Corpus(NamedTuple):
    """One corpus block: arrays of 32-bit words at offsets in `pages`.

    `separator` precedes or follows each document; it is larger than all token ids. The arrays:

    - `tokens` [T], 16 or 32 bits each.
    - `order` [T]: the suffix array, positions sorted by the tokens that follow.
    - `first` [separator + 2]: the ranges of single tokens.
    - `slots` [H, 2]: a hash table of frequent contexts with open addressing. The start of the context's range, and its
      row * 8 + its length; NONE twice in a free slot.
    - `rows` [D, ROW], one per frequent context: the number of distinct successors, of occurrences with a successor in the
      same document, then for each of the WIDTH most frequent successors the token, its count and the start of its range;
      NONE in unused columns.
    """

    pages: Pages
    size: int  # T
    separator: int
    narrow: int  # 1 = two tokens per word
    slot_count: int  # H, a power of two
    tokens: int  # offset of the array in words; also below
    order: int
    first: int
    slots: int
    rows: int

    def __deepcopy__(self, memo: dict[int, Any]) -> Corpus:
        """Itself: the arrays are read-only, and all sessions share them."""
        return self


def sort_suffixes(tokens: NDArray[Any]) -> NDArray[np.uint32]:
    """The suffix array of `tokens` (any integer [T]), uint32 [T], by prefix doubling; ties keep text order."""
    rank = tokens.astype(np.int64)  # rank of each position by its next 1, 2, 4 ... tokens
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


def tabulate(tokens: NDArray[Any], separator: int, order: NDArray[np.uint32] | None = None) -> dict[str, NDArray[Any]]:
    """The arrays of `Corpus` for a block of text (any integer [T], a `separator` between documents).

    `order` is the text's suffix array, if it is known.
    """
    first = np.zeros(separator + 2, np.uint32)
    first[1:] = np.cumsum(np.bincount(tokens, minlength=separator + 1))
    arrays: dict[str, NDArray[Any]] = {
        "tokens": tokens.astype(np.uint16 if separator < 1 << 16 else np.uint32),
        "order": sort_suffixes(tokens) if order is None else order,
        "first": first,
        "slots": np.full((1, 2), NONE, np.uint32),
        "rows": np.zeros((0, ROW), np.uint32),
    }
    pages, offsets = in_memory(arrays)
    bare = corpus_of(pages, offsets, arrays, separator)
    # There is no room for rows yet, only for counts. The empty text, which stands for no corpus, needs no kernel.
    found = _count_frequent(bare, arrays["slots"], arrays["rows"]) if len(tokens) else 0
    arrays["slots"] = np.full((1 << (2 * found + 1).bit_length(), 2), NONE, np.uint32)
    arrays["rows"] = np.full((found, ROW), NONE, np.uint32)
    if found:
        _count_frequent(bare, arrays["slots"], arrays["rows"])
    return arrays


def corpus_of(pages: Pages, offsets: Mapping[str, int], arrays: Mapping[str, NDArray[Any]], separator: int) -> Corpus:
    """The block whose `arrays` are in `pages` at `offsets`, in words."""
    tokens = arrays["tokens"]
    return Corpus(
        pages=pages,
        size=len(tokens),
        separator=separator,
        narrow=int(tokens.itemsize == 2),
        slot_count=len(arrays["slots"]),
        tokens=offsets["tokens"],
        order=offsets["order"],
        first=offsets["first"],
        slots=offsets["slots"],
        rows=offsets["rows"],
    )


def index(tokens: NDArray[Any], separator: int) -> Corpus:
    """Indexes a text (any integer [T], `separator` before each document) as a block in memory."""
    arrays = tabulate(tokens, separator)
    pages, offsets = in_memory(arrays)
    return corpus_of(pages, offsets, arrays, separator)


@kernel
def token_at(corpus: Corpus, position: int) -> int:
    """The text's token at `position`; -1 beyond the text."""
    if not 0 <= position < corpus.size:
        return -1
    if not corpus.narrow:
        return word(corpus.pages, corpus.tokens + position)
    return (word(corpus.pages, corpus.tokens + (position >> 1)) >> (16 * (position & 1))) & 0xFFFF


@kernel
def position_at(corpus: Corpus, index: int) -> int:
    """The text position at `index` of the suffix array."""
    return word(corpus.pages, corpus.order + index)


@kernel
def _token(corpus: Corpus, index: int, length: int) -> int:
    """Token number `length` of the suffix at `index` of the suffix array; -1 beyond the text."""
    return token_at(corpus, position_at(corpus, index) + length)


@kernel
def narrow(corpus: Corpus, low: int, high: int, length: int, token: int) -> tuple[int, int]:
    """The part of a context's range [low, high) where `token` follows; `length` is the context's length."""
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
    """The range where `token` follows a frequent context, and whether the row determines it."""
    at = corpus.rows + row * ROW
    distinct = word(corpus.pages, at + DISTINCT)
    for entry in range(at + SUCCESSORS, at + SUCCESSORS + 3 * min(distinct, WIDTH), 3):
        if word(corpus.pages, entry) == token:
            start = word(corpus.pages, entry + 2)
            return True, start, start + word(corpus.pages, entry + 1)
    return distinct <= WIDTH, 0, 0


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
    """Updates the ranges of a text's last 0, 1, 2 ... tokens for one more `token`; may update in place."""
    for length in range(len(low) - 1, 0, -1):
        start, end = low[length - 1], high[length - 1]
        if token >= corpus.separator:  # the corpus's vocabulary does not have it
            start, end = 0, 0
        elif length == 1:
            start, end = 0, corpus.size
        if start < end:
            start, end = narrow(corpus, start, end, length - 1, token)
        next_low[length], next_high[length] = start, max(start, end)
    next_low[0], next_high[0] = 0, corpus.size


@kernel
def _home(low: int, length: int, slots: int) -> int:
    """The first slot to probe for a frequent context."""
    mixed = np.uint64(low * 8 + length) * np.uint64(0x9E3779B97F4A7C15)
    return int(np.int64((mixed >> np.uint64(30)) & np.uint64(slots - 1)))


@kernel
def frequent_row(corpus: Corpus, low: int, length: int) -> int:
    """The row of the frequent context of `length` tokens whose range starts at `low`, or -1."""
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
    """Visits all frequent contexts, writes their rows unless `rows` is empty, and returns their number."""
    tokens = np.empty(corpus.separator + 1, np.int64)
    counts = np.empty(corpus.separator + 1, np.int64)
    starts = np.empty(corpus.separator + 1, np.int64)
    stack = [(0, corpus.size, 0)]
    found = 0
    while len(stack):
        low, high, length = stack.pop()
        distinct, i = 0, low
        while i < high:
            token = _token(corpus, i, length)
            _, end = _search(corpus, i, high, length, token) if length and token >= 0 else (i, _run(corpus, i, high, length))
            if 0 <= token < corpus.separator:
                tokens[distinct], counts[distinct], starts[distinct] = token, end - i, i
                distinct += 1
                if end - i > DENSE and length < LONGEST_CONTEXT:
                    stack.append((i, end, length + 1))
            i = end
        if len(rows):
            _write_row(slots, rows, found, low, length, tokens[:distinct], counts[:distinct], starts[:distinct])
        found += 1
    return found


@kernel
def _run(corpus: Corpus, low: int, high: int, length: int) -> int:
    """The end of the run of equal tokens that starts at `low`."""
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
    """Writes row `row` of a frequent context and enters it in the hash table."""
    slot = _home(low, length, len(slots))
    while slots[slot, 1] != NONE:
        slot = (slot + 1) & (len(slots) - 1)
    slots[slot, 0], slots[slot, 1] = low, row * 8 + length
    rows[row, DISTINCT], rows[row, TOTAL] = len(tokens), counts.sum()
    best = np.argsort(-counts, kind="mergesort")  # stable: on ties the smaller token first
    for i in range(min(len(tokens), WIDTH)):
        entry = SUCCESSORS + 3 * i
        rows[row, entry], rows[row, entry + 1], rows[row, entry + 2] = tokens[best[i]], counts[best[i]], starts[best[i]]
