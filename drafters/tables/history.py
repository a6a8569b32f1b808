"""A session's own text, indexed by its contexts of up to LONGEST_CONTEXT tokens.

A ring buffer of text with one hash chain of earlier occurrences per context length; the successors of a context are read
from its latest occurrences. Memory is bounded and time per token constant: new text overwrites the oldest.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from drafters.tables.kernel import kernel
from drafters.tables.suffix import LONGEST_CONTEXT

MAX_OCCURRENCES = 8  # latest occurrences read per context
MAX_RECENT = 128  # the same for the empty context, whose successors are the latest tokens


class History(NamedTuple):
    """Ring buffer of C tokens, C a power of two. A position counts from the start of the session's text."""

    text: NDArray[np.int32]  # [C]
    size: NDArray[np.int64]  # [1]; tokens appended so far
    newest: NDArray[np.int64]  # [L+1, 2C]; by context length and hash: the latest position after such a context, -1 = none
    older: NDArray[np.int64]  # [L+1, C]; the previous position in the same chain
    hashes: NDArray[np.uint64]  # [L+1, C]; hashes of the contexts before the position


def new_history(capacity: int) -> History:
    """Room for `capacity` tokens (rounded up to a power of two)."""
    size = 1 << max(4, (capacity - 1).bit_length())
    lengths = LONGEST_CONTEXT + 1
    return History(
        text=np.zeros(size, np.int32),
        size=np.zeros(1, np.int64),
        newest=np.full((lengths, 2 * size), -1, np.int64),
        older=np.full((lengths, size), -1, np.int64),
        hashes=np.zeros((lengths, size), np.uint64),
    )


@kernel
def extend_hashes(before: NDArray[np.uint64], token: int, after: NDArray[np.uint64]) -> None:
    """Updates the hashes of the last 0, 1, 2 ... tokens for one more `token`; `after` may be `before`."""
    for length in range(len(after) - 1, 0, -1):
        x = before[length - 1] if length > 1 else np.uint64(0)
        x = (x + np.uint64(token) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        after[length] = x ^ (x >> np.uint64(29))
    after[0] = np.uint64(0)


@kernel
def append(history: History, hashes: NDArray[np.uint64], token: int) -> None:
    """Appends a token; `hashes` are those of the contexts before it."""
    mask = len(history.text) - 1
    position = history.size[0]
    at = position & mask
    for length in range(len(hashes)):
        slot = np.int64(hashes[length] >> np.uint64(33)) & (2 * mask + 1)
        history.hashes[length, at] = hashes[length]
        history.older[length, at] = history.newest[length, slot]
        history.newest[length, slot] = position
    history.text[at] = token
    history.size[0] = position + 1


@kernel
def followers(
    history: History, length: int, key: np.uint64, tokens: NDArray[np.int64], counts: NDArray[np.float64], start: int
) -> tuple[int, int]:
    """Counts the successors of the context with hash `key` at its latest occurrences.

    Writes them to `tokens` and `counts` from index `start` on; returns the index after the last, and the number of
    occurrences.
    """
    mask = len(history.text) - 1
    max_occurrences = MAX_OCCURRENCES if length else MAX_RECENT
    oldest = history.size[0] - len(history.text)
    position = history.newest[length, np.int64(key >> np.uint64(33)) & (2 * mask + 1)]
    end, total = start, 0
    while position >= 0 and position >= oldest and total < max_occurrences:
        at = position & mask
        if history.hashes[length, at] == key:
            token = history.text[at]
            total += 1
            i = start
            while i < end and tokens[i] != token:
                i += 1
            if i == end:
                tokens[end], counts[end] = token, 0.0
                end += 1
            counts[i] += 1.0
        older = history.older[length, at]
        if older >= position:  # overwritten by newer text
            break
        position = older
    return end, total
