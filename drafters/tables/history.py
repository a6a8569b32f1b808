"""A session's own text, and for every context of up to LONGEST_CONTEXT tokens the places where it occurred.

A ring of text with one chain of earlier places per context length: what followed a context is read off its newest places.
Promises bounded memory and constant time per token; old text is forgotten as new text takes its place.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from drafters.tables.kernel import kernel
from drafters.tables.suffix import LONGEST_CONTEXT

NEWEST = 8  # places looked at per context
NEWEST_OF_ALL = 128  # the same for the empty context: a recency-weighted unigram


class History(NamedTuple):
    """Ring of C tokens, C a power of two. A place is a token's number in the whole text."""

    text: NDArray[np.int32]  # [C]
    size: NDArray[np.int64]  # [1]; tokens so far
    newest: NDArray[np.int64]  # [L+1, 2C]; by context length and hash: the newest place after such a context, -1 = none
    older: NDArray[np.int64]  # [L+1, C]; the next older place in the same chain
    hashes: NDArray[np.uint64]  # [L+1, C]; of the contexts before the place


def new_history(capacity: int) -> History:
    """Room for `capacity` tokens (rounded up to a power of two)."""
    size = 1 << max(4, (capacity - 1).bit_length())
    lengths = LONGEST_CONTEXT + 1
    return History(
        np.zeros(size, np.int32),
        np.zeros(1, np.int64),
        np.full((lengths, 2 * size), -1, np.int64),
        np.full((lengths, size), -1, np.int64),
        np.zeros((lengths, size), np.uint64),
    )


@kernel
def extend_hashes(before: NDArray[np.uint64], token: int, after: NDArray[np.uint64]) -> None:
    """The hashes of the last 0, 1, 2 ... tokens once `token` has been added; may be done in place."""
    for length in range(len(after) - 1, 0, -1):
        x = before[length - 1] if length > 1 else np.uint64(0)
        x = (x + np.uint64(token) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        after[length] = x ^ (x >> np.uint64(29))
    after[0] = np.uint64(0)


@kernel
def append(history: History, hashes: NDArray[np.uint64], token: int) -> None:
    """Adds a token; `hashes` are those of the contexts before it."""
    mask = len(history.text) - 1
    place = history.size[0]
    at = place & mask
    for length in range(len(hashes)):
        slot = np.int64(hashes[length] >> np.uint64(33)) & (2 * mask + 1)
        history.hashes[length, at] = hashes[length]
        history.older[length, at] = history.newest[length, slot]
        history.newest[length, slot] = place
    history.text[at] = token
    history.size[0] = place + 1


@kernel
def followers(
    history: History, length: int, key: np.uint64, tokens: NDArray[np.int64], counts: NDArray[np.float64], start: int
) -> tuple[int, int]:
    """Counts what followed the context with hash `key` at its newest places, into `tokens` and `counts` from `start` on.

    Returns the end of what was written, and the number of places.
    """
    mask = len(history.text) - 1
    most = NEWEST if length else NEWEST_OF_ALL
    oldest = history.size[0] - len(history.text)
    place = history.newest[length, np.int64(key >> np.uint64(33)) & (2 * mask + 1)]
    end, total = start, 0
    while place >= 0 and place >= oldest and total < most:
        at = place & mask
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
        if older >= place:  # overwritten by newer text
            break
        place = older
    return end, total
