"""Levels: what each source says of a context, longest context first.

A *level* is a source and a context length: "the corpus after the last 3 tokens", "the session after the last 5",
"the tri-gram table", "the client's prediction". Each lists successors with shares q(t); how far to trust it stands in a
table by source, length, and how often and how diversely the context went on. `drafters.tables.mixture` makes one
probability of them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from drafters.interface import Source
from drafters.tables.adaptive import Rows, successors
from drafters.tables.history import NEWEST_OF_ALL, History, extend_hashes, followers
from drafters.tables.kernel import kernel
from drafters.tables.ngram import BaseArrays
from drafters.tables.pages import word
from drafters.tables.suffix import (
    DENSE,
    DISTINCT,
    LONGEST_CONTEXT,
    ROW,
    SUCCESSORS,
    TOTAL,
    WIDTH,
    Corpus,
    follow,
    frequent_row,
    position_at,
    token_at,
)

LENGTHS = LONGEST_CONTEXT + 1  # context lengths 0 to LONGEST_CONTEXT
CORPUS, SESSION, TABLE, PREDICTION = 0, 1, 2, 3  # kinds of source
SOURCES = np.array([Source.RETRIEVAL, Source.LOOKUP, Source.TRIGRAM, Source.PREDICTION], np.uint8)  # by kind
SIZES, KINDS = 8, 6
BUCKETS = 4 * LENGTHS * SIZES * KINDS
TABLE_ORDER = 3  # the table's n-grams: tri-grams and bi-grams
DISCOUNT = 0.5  # absolute discount of a count, where there is more than one
LISTED = 512  # successors considered of one context


class Sources(NamedTuple):
    """All that predictions are made from."""

    corpora: tuple[Corpus, ...]  # at least one, maybe of no text
    history: History
    base: BaseArrays
    rows: Rows
    expected: NDArray[np.int32]  # [M]; the client's prediction, its length first
    hits: NDArray[np.float64]  # [BUCKETS]; trust = hits / tries
    tries: NDArray[np.float64]
    boost: NDArray[np.float64]  # [CELLS]


class Contexts(NamedTuple):
    """What a context is to each source; row 0 is the committed text, further rows are draft nodes."""

    low: NDArray[np.int64]  # [N, corpora, LENGTHS]; ranges of the last 0, 1, 2 ... tokens
    high: NDArray[np.int64]
    hashes: NDArray[np.uint64]  # [N, LENGTHS]
    last: NDArray[np.int32]  # [N, 2]; the token before the last one, and the last one; -1 = none
    expected: NDArray[np.int32]  # [N, 2]; place in the prediction, and tokens in a row that agreed with it; place 0 = none


class Scratch(NamedTuple):
    """Preallocated room for one prediction."""

    tokens: NDArray[np.int64]  # [W]; what the levels list, one level after another
    counts: NDArray[np.float64]  # [W]
    starts: NDArray[np.int64]  # [levels + 1]
    buckets: NDArray[np.int64]  # [levels]
    discounts: NDArray[np.float64]  # [levels]
    norms: NDArray[np.float64]  # [levels]
    marks: NDArray[np.int64]  # [levels]; context length * 4 + kind of source
    where: NDArray[np.int32]  # [V]; a token's place in `out`
    out: NDArray[np.int64]  # [LISTED]
    probability: NDArray[np.float64]  # [LISTED]
    out_mark: NDArray[np.int64]  # [LISTED]; of the first level that listed the token
    agreed: NDArray[np.int64]  # [LISTED]; bits of the corpus (1) and the session (2), where they listed the token
    recent: NDArray[np.int64]  # [3]; the session's empty context: text size it was counted at, successors, places
    recent_tokens: NDArray[np.int64]  # [NEWEST_OF_ALL]; its successors, which all nodes of a tree share
    recent_counts: NDArray[np.float64]
    row_tokens: NDArray[np.int32]  # [S]; workspace of the table's level
    row_probabilities: NDArray[np.float32]


def new_contexts(size: int, corpora: int) -> Contexts:
    """Room for `size` contexts."""
    return Contexts(
        np.zeros((size, corpora, LENGTHS), np.int64),
        np.zeros((size, corpora, LENGTHS), np.int64),
        np.zeros((size, LENGTHS), np.uint64),
        np.full((size, 2), -1, np.int32),
        np.zeros((size, 2), np.int32),
    )


def new_scratch(vocabulary: int, corpora: int, row: int) -> Scratch:
    """Room for tokens below `vocabulary`."""
    levels = LENGTHS * (corpora + 1) + 3
    room = levels * (DENSE + 128)
    return Scratch(
        np.zeros(room, np.int64),
        np.zeros(room, np.float64),
        np.zeros(levels + 1, np.int64),
        np.zeros(levels, np.int64),
        np.zeros(levels, np.float64),
        np.zeros(levels, np.float64),
        np.zeros(levels, np.int64),
        np.zeros(vocabulary, np.int32),
        np.zeros(LISTED, np.int64),
        np.zeros(LISTED, np.float64),
        np.zeros(LISTED, np.int64),
        np.zeros(LISTED, np.int64),
        np.full(3, -1, np.int64),
        np.zeros(NEWEST_OF_ALL, np.int64),
        np.zeros(NEWEST_OF_ALL, np.float64),
        np.zeros(row, np.int32),
        np.zeros(row, np.float32),
    )


@kernel
def bucket(source: int, length: int, total: float, kinds: int) -> int:
    """The trust table's entry for a context that occurred `total` times with `kinds` different successors."""
    if total <= 3:
        size = int(total) - 1
    elif total <= 5:
        size = 3
    elif total <= 9:
        size = 4
    elif total <= 20:
        size = 5
    elif total <= 100:
        size = 6
    else:
        size = 7
    ratio = kinds / total
    if kinds == 1:
        kind = 0
    elif ratio <= 0.125:
        kind = 1
    elif ratio <= 0.25:
        kind = 2
    elif ratio <= 0.5:
        kind = 3
    elif ratio <= 0.75:
        kind = 4
    else:
        kind = 5
    return ((source * LENGTHS + length) * SIZES + size) * KINDS + kind


@kernel
def advance(sources: Sources, contexts: Contexts, source: int, token: int, target: int) -> None:
    """Makes row `target` the context of row `source` with `token` behind it; the same row will do."""
    low, high = contexts.low, contexts.high
    for c in range(len(sources.corpora)):
        follow(sources.corpora[c], low[source, c], high[source, c], token, low[target, c], high[target, c])
    extend_hashes(contexts.hashes[source], token, contexts.hashes[target])
    contexts.last[target, 0], contexts.last[target, 1] = contexts.last[source, 1], token
    place, run = contexts.expected[source, 0], contexts.expected[source, 1]
    agrees = 0 < place <= sources.expected[0] and sources.expected[place] == token
    contexts.expected[target, 0] = place + 1 if agrees else 0
    contexts.expected[target, 1] = run + 1 if agrees else 0


@kernel
def _close(scratch: Scratch, level: int, begin: int, end: int, source: int, length: int, total: float, kinds: int) -> int:
    """Notes a level that has listed its successors in [begin, end); returns the number of levels."""
    cut = DISCOUNT if total > 1 and total > DISCOUNT * kinds else 0.0
    scratch.starts[level], scratch.starts[level + 1] = begin, end
    scratch.buckets[level] = bucket(source, length, total, kinds)
    scratch.discounts[level] = cut
    scratch.norms[level] = total - cut * kinds
    scratch.marks[level] = length * 4 + source
    return level + 1


@kernel
def _corpus_level(corpus: Corpus, low: int, high: int, length: int, scratch: Scratch, begin: int) -> tuple[int, int, int]:
    """Lists the successors of a range; returns the end, how often the context went on, and with how many."""
    end, pages = begin, corpus.pages
    if high - low > DENSE:
        row = frequent_row(corpus, low, length)
        if row < 0:
            return begin, 0, 0
        at = corpus.rows + row * ROW
        kinds = word(pages, at + DISTINCT)
        for entry in range(at + SUCCESSORS, at + SUCCESSORS + 3 * min(kinds, WIDTH), 3):
            scratch.tokens[end], scratch.counts[end] = word(pages, entry), word(pages, entry + 1)
            end += 1
        return end, word(pages, at + TOTAL), kinds
    total = 0
    for place in range(low, high):
        token = token_at(corpus, position_at(corpus, place) + length)
        if token < 0 or token == corpus.separator:
            continue
        total += 1
        if end > begin and scratch.tokens[end - 1] == token:
            scratch.counts[end - 1] += 1.0
        else:
            scratch.tokens[end], scratch.counts[end] = token, 1.0
            end += 1
    return end, total, end - begin


@kernel
def _recent(history: History, scratch: Scratch, begin: int) -> tuple[int, int]:
    """The session's newest tokens whatever stood before them, counted once per step; returns as `followers` does."""
    if scratch.recent[0] != history.size[0]:
        found, places = followers(history, 0, np.uint64(0), scratch.recent_tokens, scratch.recent_counts, 0)
        scratch.recent[0], scratch.recent[1], scratch.recent[2] = history.size[0], found, places
    for i in range(scratch.recent[1]):
        scratch.tokens[begin + i], scratch.counts[begin + i] = scratch.recent_tokens[i], scratch.recent_counts[i]
    return begin + scratch.recent[1], scratch.recent[2]


@kernel
def _table_level(sources: Sources, contexts: Contexts, row: int, scratch: Scratch, level: int, begin: int) -> int:
    """The tri-gram table's level: what it says is a distribution already. Trusted by its likeliest token's probability."""
    previous, last = contexts.last[row, 0], contexts.last[row, 1]
    if last < 0:
        return level
    tokens, probabilities = scratch.row_tokens, scratch.row_probabilities
    found = successors(sources.base, sources.rows, -1, previous, last, TABLE_ORDER, tokens, probabilities)
    if not found or scratch.row_probabilities[0] <= 0.0:
        return level
    mass = 0.0
    for i in range(found):
        scratch.tokens[begin + i], scratch.counts[begin + i] = scratch.row_tokens[i], scratch.row_probabilities[i]
        mass += scratch.row_probabilities[i]
    size = min(SIZES - 1, int(scratch.row_probabilities[0] * SIZES))
    spread = min(KINDS - 1, int((1.0 - min(1.0, mass)) * KINDS))
    scratch.starts[level], scratch.starts[level + 1] = begin, begin + found
    scratch.buckets[level] = ((TABLE * LENGTHS) * SIZES + size) * KINDS + spread
    scratch.discounts[level], scratch.norms[level], scratch.marks[level] = 0.0, mass, 2 * 4 + TABLE
    return level + 1


@kernel
def levels(sources: Sources, contexts: Contexts, row: int, scratch: Scratch, least: float) -> int:
    """All levels that know the context, the longest first, until less than `least` mass is left; returns how many."""
    # Taken out once: each look into a tuple of arrays counts references.
    history, corpora, hashes, low, high = sources.history, sources.corpora, contexts.hashes, contexts.low, contexts.high
    hits, tries, tokens, counts, buckets = sources.hits, sources.tries, scratch.tokens, scratch.counts, scratch.buckets
    level, end, left = 0, 0, 1.0
    place, run = contexts.expected[row, 0], contexts.expected[row, 1]
    if 0 < place <= sources.expected[0]:
        tokens[0], counts[0] = sources.expected[place], 1.0
        level = _close(scratch, level, 0, 1, PREDICTION, 0, min(run + 1, 101), 1)
        scratch.discounts[0], scratch.norms[0] = 0.0, 1.0
        end = 1
    table = sources.rows.clock[0] > 0 or corpora[0].size == 0
    same, weighed = -1, 0
    for length in range(LENGTHS - 1, -1, -1):
        if length == 2 and table:
            level = _table_level(sources, contexts, row, scratch, level, end)
            end = scratch.starts[level] if level else end
        if length:
            stop, total = followers(history, length, hashes[row, length], tokens, counts, end)
        else:
            stop, total = _recent(history, scratch, end)
        if stop > end and total != same:  # else the longer context has said the same
            level = _close(scratch, level, end, stop, SESSION, length, total, stop - end)
            end, same = stop, total
        for c in range(low.shape[1]):
            size = high[row, c, length] - low[row, c, length]
            longer = high[row, c, length + 1] - low[row, c, length + 1] if length + 1 < LENGTHS else 0
            if size > longer:
                stop, total, kinds = _corpus_level(corpora[c], low[row, c, length], high[row, c, length], length, scratch, end)
                if stop > end:
                    level = _close(scratch, level, end, stop, CORPUS, length, total, kinds)
                    end = stop
        while weighed < level:
            left *= 1.0 - hits[buckets[weighed]] / tries[buckets[weighed]]
            weighed += 1
        if left < least:
            break
    return level
