"""A session's own text, indexed by its contexts of up to LONGEST_CONTEXT tokens.

A ring buffer of text with one hash chain of earlier occurrences per context length; the successors of a context are read
from its latest occurrences. Memory is bounded and time per token constant: new text overwrites the oldest.

A *copy* follows one earlier span that the text repeats, longer than any context: an answer that edits a file repeats it from
the prompt with small changes. Where the text departs from the span, the copy goes on nearby.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.drafters.kernel import kernel
from outrider.drafters.tables.suffix import LONGEST_CONTEXT

# This many of the latest occurrences of a context are read.
MAX_OCCURRENCES = 8
# The empty context has its own limit, because its successors are the latest tokens.
MAX_RECENT = 128

POSITION, RUN, CHANGES, GAP, SKIPPED = range(5)
COPY_STATE = 5
# This many matched tokens are compared to choose the span to copy.
LONGEST_COPY = 32
# After this many matches in a row, the number of departures is reset.
SETTLED = 16
# Classes of copies are separated by these numbers of matched tokens.
RUN_EDGES = (6, 8, 11, 15, 20, 28, 31)
# A copy ends after more tokens in a row that do not match.
MAX_GAP = 8
# A departure may leave out this many tokens of the span.
REACH = 12


class History(NamedTuple):
    """Ring buffer of C tokens, C a power of two. A position counts from the start of the session's text."""

    text: NDArray[np.int32]  # [C]
    # The tokens appended so far, and the last departure that left out tokens of a span: the token before it and the number
    # left out. They share an array, because each array in the nested tuples makes each call of a kernel slower.
    size: NDArray[np.int64]  # [3]
    newest: NDArray[np.int64]  # [L+1, 2C]; by context length and hash: the latest position after such a context, -1 = none
    older: NDArray[np.int64]  # [L+1, C]; the previous position in the same chain
    hashes: NDArray[np.uint64]  # [L+1, C]; hashes of the contexts before the position


def new_history(capacity: int) -> History:
    """Room for `capacity` tokens (rounded up to a power of two)."""
    size = 1 << max(4, (capacity - 1).bit_length())
    lengths = LONGEST_CONTEXT + 1
    return History(
        text=np.zeros(size, np.int32),
        size=np.array([0, -1, 0], np.int64),
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
        if older >= position:  # newer text has overwritten it
            break
        position = older
    return end, total


@kernel
def find_copy(history: History, key: np.uint64, copy: NDArray[np.int64]) -> None:
    """Starts a copy where the longest match of the text's end occurred before, if that is longer than the copy's own match.

    `key` is the hash of the last LONGEST_CONTEXT tokens. `copy` holds the state: the position of the next token to copy, -1 =
    none; the tokens matched in a row; the departures; the tokens without a match since the last one; the tokens skipped
    before the position.
    """
    text, size, mask = history.text, history.size[0], len(history.text) - 1
    length = copy[RUN] if copy[POSITION] >= 0 else 0
    position = history.newest[LONGEST_CONTEXT, np.int64(key >> np.uint64(33)) & (2 * mask + 1)]
    for _ in range(MAX_OCCURRENCES):
        if length >= LONGEST_COPY or position < LONGEST_CONTEXT or position <= size - len(text) + LONGEST_COPY:
            break
        if history.hashes[LONGEST_CONTEXT, position & mask] == key:
            run = LONGEST_CONTEXT
            while run < min(position, LONGEST_COPY) and text[(position - 1 - run) & mask] == text[(size - 1 - run) & mask]:
                run += 1
            if run > length:
                length = run
                copy[POSITION], copy[RUN], copy[CHANGES], copy[GAP], copy[SKIPPED] = position, run, 0, 0, 0
        position = history.older[LONGEST_CONTEXT, position & mask]


@kernel
def follow_copy(
    history: History, before: NDArray[np.int64], previous: int, token: int, after: NDArray[np.int64], committed: bool
) -> None:
    """Updates the state of a copy for one more `token`, which follows `previous`; `after` may be `before`.

    A departure left tokens of the span out, or inserted tokens, or else is taken to replace one token by another. The same
    number of tokens is skipped again after the next token like that before the last omission, as with line numbers in a
    listing of the file. `token` is the end of the history if `committed`, otherwise part of a draft.
    """
    after[POSITION] = position = before[POSITION]
    if position < 0:
        return
    run, changes, gap, skipped = before[RUN], before[CHANGES], before[GAP], before[SKIPPED]
    text, mask, end = history.text, len(history.text) - 1, history.size[0] - committed
    if text[position & mask] == token:
        run, gap, skipped = run + 1, 0, 0
        changes = 0 if run >= SETTLED else changes
        if token == history.size[1] and position + 1 + history.size[2] < end:
            skipped = history.size[2]
        position += 1 + skipped
    else:
        found = _nearest(history, position, gap + skipped, token, end)
        if found != position and committed and gap == 0:
            history.size[1], history.size[2] = previous, max(0, found - position + skipped)
        run, gap = (0, gap + 1) if found == position else (1, 0)
        changes, skipped = changes + 1, 0
        position = found + 1
    if gap > MAX_GAP or not max(0, history.size[0] - len(text) + LONGEST_COPY) <= position < history.size[0]:
        position = -1
    after[POSITION], after[RUN], after[CHANGES], after[GAP], after[SKIPPED] = position, run, changes, gap, skipped


@kernel
def copy_phase(copy: NDArray[np.int64]) -> tuple[int, int, int]:
    """What the trust in a copy depends on: its phase, its matched tokens or their class, its changes.

    Phase 1 has the first tokens after a departure, phase 2 the first after a skip, phase 0 all others.
    """
    run, changes = copy[RUN], copy[CHANGES]
    if copy[SKIPPED] == 0 and changes > 0 and run < LONGEST_CONTEXT:
        return 1, run, copy[GAP] if run == 0 else changes - 1
    size = 0
    for edge in RUN_EDGES:
        size += run > edge
    return 2 if copy[SKIPPED] else 0, size, changes


@kernel
def _nearest(history: History, position: int, back: int, token: int, end: int) -> int:
    """The place of `token` in the REACH tokens after `position`, or else in the `back` tokens before it, or else `position`."""
    mask = len(history.text) - 1
    for place in range(position + 1, min(position + 1 + REACH, end)):
        if history.text[place & mask] == token:
            return place
    for place in range(position - 1, max(-1, position - 1 - back), -1):
        if history.text[place & mask] == token:
            return place
    return position
