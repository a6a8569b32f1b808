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

from outrider.drafters.native.library import native, structure
from outrider.drafters.tables.pages import Pages, in_memory

KIND = "suffix"
# The suffix array is sorted by this many tokens, which is also the longest match.
MAX_MATCH = 16
# The successors of frequent contexts of up to this many tokens are precomputed.
LONGEST_CONTEXT = 6
# A context with more occurrences is frequent.
DENSE = 32
# This many successors are stored for a frequent context.
WIDTH = 16
NONE = (1 << 32) - 1
DISTINCT, TOTAL, SUCCESSORS = 0, 1, 2
ROW = SUCCESSORS + 3 * WIDTH


@structure
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
    # There is no room for rows yet, only for counts. The empty text, which stands for no corpus, needs no library.
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


@native
def _count_frequent(corpus: Corpus, slots: NDArray[np.uint32], rows: NDArray[np.uint32]) -> int:
    """Visits all frequent contexts, writes their rows unless `rows` is empty, and returns their number."""
