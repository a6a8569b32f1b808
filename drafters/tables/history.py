"""A session's own text, indexed by its contexts of up to LONGEST_CONTEXT tokens.

A ring buffer of text with one hash chain of earlier occurrences per context length; the successors of a context are read
from its latest occurrences. Memory is bounded and time per token constant: new text overwrites the oldest.

A *copy* follows one earlier span that the text repeats, longer than any context: an answer that edits a file repeats it from
the prompt with small changes. Where the text departs from the span, the copy goes on nearby.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.drafters.native.library import native, structure, zeros
from outrider.drafters.tables.suffix import LONGEST_CONTEXT

# This many of the latest occurrences of a context are read; the empty context has its own limit, because its successors are the
# latest tokens.
MAX_OCCURRENCES = 8
MAX_RECENT = 128

POSITION, RUN, CHANGES, GAP, SKIPPED = range(5)
COPY_STATE = 5
# A copy ends after more tokens in a row that do not match.
MAX_GAP = 8


@structure
class History(NamedTuple):
    """Ring buffer of C tokens, C a power of two. A position counts from the start of the session's text."""

    text: NDArray[np.int32]  # [C]
    # The tokens appended so far, and the last departure that left out tokens of a span: the token before it and the number
    # left out.
    size: NDArray[np.int64]  # [3]
    newest: NDArray[np.int64]  # [L+1, 2C]; by context length and hash: the latest position after such a context, -1 = none
    older: NDArray[np.int64]  # [L+1, C]; the previous position in the same chain
    hashes: NDArray[np.uint64]  # [L+1, C]; hashes of the contexts before the position


def new_history(capacity: int) -> History:
    """Room for `capacity` tokens (rounded up to a power of two)."""
    size = 1 << max(4, (capacity - 1).bit_length())
    lengths = LONGEST_CONTEXT + 1
    newest, older = np.full((lengths, 2 * size), -1, np.int64), np.full((lengths, size), -1, np.int64)
    return zeros(History, (lengths, size), text=size, size=np.array([0, -1, 0], np.int64), newest=newest, older=older)


@native
def extend_hashes(before: NDArray[np.uint64], token: int, after: NDArray[np.uint64]) -> None:
    """Updates the hashes of the last 0, 1, 2 ... tokens for one more `token`; `after` may be `before`."""


@native
def append(history: History, hashes: NDArray[np.uint64], token: int) -> None:
    """Appends a token; `hashes` are those of the contexts before it."""


@native
def followers(
    history: History, length: int, key: np.uint64, tokens: NDArray[np.int64], counts: NDArray[np.float64], start: int
) -> tuple[int, int]:
    """Counts the successors of the context with hash `key` at its latest occurrences.

    Writes them to `tokens` and `counts` from index `start` on; returns the index after the last, and the number of
    occurrences.
    """


@native
def find_copy(history: History, key: np.uint64, copy: NDArray[np.int64]) -> None:
    """Starts a copy where the longest match of the text's end occurred before, if that is longer than the copy's own match.

    `key` is the hash of the last LONGEST_CONTEXT tokens. `copy` holds the state: the position of the next token to copy, -1 =
    none; the tokens matched in a row; the departures; the tokens without a match since the last one; the tokens skipped
    before the position.
    """


@native
def follow_copy(
    history: History, before: NDArray[np.int64], previous: int, token: int, after: NDArray[np.int64], committed: bool
) -> None:
    """Updates the state of a copy for one more `token`, which follows `previous`; `after` may be `before`.

    A departure left tokens of the span out, or inserted tokens, or else is taken to replace one token by another. The same
    number of tokens is skipped again after the next token like that before the last omission, as with line numbers in a
    listing of the file. `token` is the end of the history if `committed`, otherwise part of a draft.
    """
