"""Levels: the successors that each source lists for a context, longest context first.

A *level* is a source and a context length, for example "the corpus after the last 3 tokens", "the session after the last
5", "the span that the session copies", "the tri-gram table" or "the client's prediction". It lists successors t with shares
q(t). A table gives the trust in a level by source, context length, number of occurrences and diversity of successors.
`outrider.drafters.tables.mixture` interpolates the levels into one distribution.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.drafters.interface import Source
from outrider.drafters.kernel import kernel
from outrider.drafters.tables.contexts import LENGTHS, Contexts, Sources
from outrider.drafters.tables.history import (
    MAX_RECENT,
    POSITION,
    History,
    copy_phase,
    followers,
)
from outrider.drafters.tables.learned_table import successors
from outrider.drafters.tables.pages import word
from outrider.drafters.tables.suffix import (
    DENSE,
    DISTINCT,
    LONGEST_CONTEXT,
    ROW,
    SUCCESSORS,
    TOTAL,
    WIDTH,
    Corpus,
    frequent_row,
    position_at,
    token_at,
)

# Luck is a source, but no level (`outrider.drafters.tables.dice`).
CORPUS, SESSION, TABLE, PREDICTION, COPY, LUCK = range(6)
NODE_SOURCES = np.array(
    [Source.RETRIEVAL, Source.LOOKUP, Source.TRIGRAM, Source.PREDICTION, Source.LOOKUP, Source.NOISE], np.uint8
)
# Contexts share a bucket of trust by how often they occurred.
SIZE_EDGES = (1, 2, 3, 5, 9, 20, 100)
# Buckets also differ by the distinct successors per occurrence, if a context has several.
DIVERSITY_EDGES = (0.0, 0.125, 0.25, 0.5, 0.75)
SIZES, DIVERSITIES = len(SIZE_EDGES) + 1, len(DIVERSITY_EDGES) + 1
BUCKETS = 5 * LENGTHS * SIZES * DIVERSITIES
# The table's n-grams are bi-grams and tri-grams.
TABLE_ORDER = 3
# This is subtracted from each count, for contexts that occurred more than once (absolute discounting).
DISCOUNT = 0.5
MAX_SUCCESSORS = 512
RECENT_AT, RECENT_FOUND, RECENT_TOTAL = 0, 1, 2


class Scratch(NamedTuple):
    """Preallocated buffers for one prediction. `W` holds the successors of all levels, one level after another."""

    tokens: NDArray[np.int64]  # [W]
    counts: NDArray[np.float64]  # [W]
    starts: NDArray[np.int64]  # [levels + 1]; level i lists [starts[i], starts[i + 1]); starts[0] = 0
    buckets: NDArray[np.int64]  # [levels]; entry of the trust table
    discounts: NDArray[np.float64]  # [levels]
    norms: NDArray[np.float64]  # [levels]; q(t) = (count - discount) / norm
    level_lengths: NDArray[np.int64]  # [levels]; context length
    level_sources: NDArray[np.int64]  # [levels]
    index_of: NDArray[np.int32]  # [V]; a token's index in `out`
    out: NDArray[np.int64]  # [MAX_SUCCESSORS]; predicted tokens
    probability: NDArray[np.float64]  # [MAX_SUCCESSORS]
    out_length: NDArray[np.int64]  # [MAX_SUCCESSORS]; context length of the first level that listed the token
    out_source: NDArray[np.int64]  # [MAX_SUCCESSORS]; source of that level
    out_agreement: NDArray[np.int64]  # [MAX_SUCCESSORS]; bit 0: a corpus listed the token, bit 1: the session did
    recent: NDArray[np.int64]  # [3]; the session's empty context: text size when counted, successors, occurrences
    recent_tokens: NDArray[np.int64]  # [MAX_RECENT]; its successors, shared by all nodes of a tree
    recent_counts: NDArray[np.float64]  # [MAX_RECENT]
    row_tokens: NDArray[np.int32]  # [S]; successors in the tri-gram table
    row_probabilities: NDArray[np.float32]  # [S]


def new_scratch(vocabulary: int, corpora: int, row: int) -> Scratch:
    """Buffers for token ids below `vocabulary` and tri-gram rows of `row` successors."""
    levels = LENGTHS * (corpora + 1) + 4
    width = levels * (DENSE + 128)
    return Scratch(
        tokens=np.zeros(width, np.int64),
        counts=np.zeros(width, np.float64),
        starts=np.zeros(levels + 1, np.int64),
        buckets=np.zeros(levels, np.int64),
        discounts=np.zeros(levels, np.float64),
        norms=np.zeros(levels, np.float64),
        level_lengths=np.zeros(levels, np.int64),
        level_sources=np.zeros(levels, np.int64),
        index_of=np.zeros(vocabulary, np.int32),
        out=np.zeros(MAX_SUCCESSORS, np.int64),
        probability=np.zeros(MAX_SUCCESSORS, np.float64),
        out_length=np.zeros(MAX_SUCCESSORS, np.int64),
        out_source=np.zeros(MAX_SUCCESSORS, np.int64),
        out_agreement=np.zeros(MAX_SUCCESSORS, np.int64),
        recent=np.full(3, -1, np.int64),
        recent_tokens=np.zeros(MAX_RECENT, np.int64),
        recent_counts=np.zeros(MAX_RECENT, np.float64),
        row_tokens=np.zeros(row, np.int32),
        row_probabilities=np.zeros(row, np.float32),
    )


@kernel
def _index(source: int, length: int, size: int, diversity: int) -> int:
    """The row-major index into the trust table [5, LENGTHS, SIZES, DIVERSITIES]."""
    return ((source * LENGTHS + length) * SIZES + size) * DIVERSITIES + diversity


@kernel
def bucket(source: int, length: int, total: float, distinct: int) -> int:
    """The trust table's entry for a context that occurred `total` times with `distinct` successors."""
    size = 0
    for edge in SIZE_EDGES:
        size += total > edge
    diversity = 0
    for ratio in DIVERSITY_EDGES:
        diversity += distinct > 1 and distinct > ratio * total
    return _index(source, length, size, diversity)


@kernel
def _put_level(
    scratch: Scratch, level: int, end: int, source: int, length: int, entry: int, discount: float, norm: float
) -> int:
    """Records level `level`, whose successors end at `end` in the buffers; returns the number of levels.

    `entry` is that of the trust table.
    """
    scratch.starts[level + 1], scratch.buckets[level] = end, entry
    scratch.discounts[level], scratch.norms[level] = discount, norm
    scratch.level_lengths[level], scratch.level_sources[level] = length, source
    return level + 1


@kernel
def _add_level(scratch: Scratch, level: int, end: int, source: int, length: int, total: float, distinct: int) -> int:
    """Records a level of `distinct` successors that were counted `total` times; returns the number of levels."""
    discount = DISCOUNT if total > 1 and total > DISCOUNT * distinct else 0.0
    entry = bucket(source, length, total, distinct)
    return _put_level(scratch, level, end, source, length, entry, discount, total - discount * distinct)


@kernel
def _prediction_level(scratch: Scratch, token: int, run: int) -> int:
    """Level 0: the next `token` of the client's prediction after `run` matched tokens; returns the number of levels."""
    scratch.tokens[0], scratch.counts[0] = token, 1.0
    return _put_level(scratch, 0, 1, PREDICTION, 0, bucket(PREDICTION, 0, min(run + 1, 101), 1), 0.0, 1.0)


@kernel
def _copy_level(history: History, copy: NDArray[np.int64], scratch: Scratch, level: int) -> int:
    """The next token of the span that is copied; returns the number of levels."""
    begin = scratch.starts[level]
    scratch.tokens[begin], scratch.counts[begin] = history.text[copy[POSITION] & (len(history.text) - 1)], 1.0
    phase, run, changes = copy_phase(copy)
    entry = _index(COPY, phase, min(run, SIZES - 1), min(changes, DIVERSITIES - 1))
    return _put_level(scratch, level, begin + 1, COPY, LONGEST_CONTEXT, entry, 0.0, 1.0)


@kernel
def _table_level(sources: Sources, contexts: Contexts, row: int, scratch: Scratch, level: int) -> int:
    """The tri-gram table's distribution as one level; returns the number of levels.

    Its trust depends on the likeliest token's probability and on the mass that the table leaves to other tokens.
    """
    previous, last = contexts.last[row, 0], contexts.last[row, 1]
    if last < 0:
        return level
    tokens, probabilities = scratch.row_tokens, scratch.row_probabilities
    found = successors(sources.base, sources.rows, -1, previous, last, TABLE_ORDER, tokens, probabilities)
    if not found or probabilities[0] <= 0.0:
        return level
    begin, mass = scratch.starts[level], 0.0
    for i in range(found):
        scratch.tokens[begin + i], scratch.counts[begin + i] = tokens[i], probabilities[i]
        mass += probabilities[i]
    size = min(SIZES - 1, int(probabilities[0] * SIZES))
    diversity = min(DIVERSITIES - 1, int((1.0 - min(1.0, mass)) * DIVERSITIES))
    return _put_level(scratch, level, begin + found, TABLE, TABLE_ORDER - 1, _index(TABLE, 0, size, diversity), 0.0, mass)


@kernel
def _recent(history: History, scratch: Scratch, begin: int) -> tuple[int, int]:
    """`followers` of the empty context, counted once per step: all nodes of a tree share it."""
    recent = scratch.recent
    if recent[RECENT_AT] != history.size[0]:
        recent[RECENT_FOUND], recent[RECENT_TOTAL] = followers(
            history, 0, np.uint64(0), scratch.recent_tokens, scratch.recent_counts, 0
        )
        recent[RECENT_AT] = history.size[0]
    for i in range(recent[RECENT_FOUND]):
        scratch.tokens[begin + i], scratch.counts[begin + i] = scratch.recent_tokens[i], scratch.recent_counts[i]
    return begin + recent[RECENT_FOUND], recent[RECENT_TOTAL]


@kernel
def _corpus_successors(corpus: Corpus, low: int, high: int, length: int, scratch: Scratch, begin: int) -> tuple[int, int, int]:
    """Lists the successors of a range from `begin` on; returns their end, the number of occurrences and of distinct ones."""
    end, pages = begin, corpus.pages
    if high - low > DENSE:
        row = frequent_row(corpus, low, length)
        if row < 0:
            return begin, 0, 0
        at = corpus.rows + row * ROW
        distinct = word(pages, at + DISTINCT)
        for entry in range(at + SUCCESSORS, at + SUCCESSORS + 3 * min(distinct, WIDTH), 3):
            scratch.tokens[end], scratch.counts[end] = word(pages, entry), word(pages, entry + 1)
            end += 1
        return end, word(pages, at + TOTAL), distinct
    total = 0
    for index in range(low, high):
        token = token_at(corpus, position_at(corpus, index) + length)
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
def levels(sources: Sources, contexts: Contexts, row: int, scratch: Scratch, min_mass: float) -> int:
    """Lists the levels of a context, longest first, until less than `min_mass` mass remains; returns their number.

    A session level is skipped if the next longer one had as many occurrences, a corpus level if the next longer range is
    the same: it would repeat the same successors.
    """
    history, corpora, hashes, low, high = sources.history, sources.corpora, contexts.hashes, contexts.low, contexts.high
    hits, tries, tokens, counts = sources.hits, sources.tries, scratch.tokens, scratch.counts
    starts, buckets = scratch.starts, scratch.buckets
    level, weighed, remaining, session_total = 0, 0, 1.0, -1
    index, run = contexts.expected[row, 0], contexts.expected[row, 1]
    if 0 < index <= sources.expected[0]:
        level = _prediction_level(scratch, sources.expected[index], run)
    if contexts.last[row, 2 + POSITION] >= 0:
        level = _copy_level(history, contexts.last[row, 2:], scratch, level)
    has_table = sources.rows.clock[0] > 0 or corpora[0].size == 0
    for length in range(LENGTHS - 1, -1, -1):
        if length == TABLE_ORDER - 1 and has_table:
            level = _table_level(sources, contexts, row, scratch, level)
        begin = starts[level]
        if length:
            end, total = followers(history, length, hashes[row, length], tokens, counts, begin)
        else:
            end, total = _recent(history, scratch, begin)
        if end > begin and total != session_total:
            level = _add_level(scratch, level, end, SESSION, length, total, end - begin)
            session_total = total
        for c in range(low.shape[1]):
            size = high[row, c, length] - low[row, c, length]
            longer = high[row, c, length + 1] - low[row, c, length + 1] if length + 1 < LENGTHS else 0
            if size > longer:
                begin, first, last = starts[level], low[row, c, length], high[row, c, length]
                end, total, distinct = _corpus_successors(corpora[c], first, last, length, scratch, begin)
                if end > begin:
                    level = _add_level(scratch, level, end, CORPUS, length, total, distinct)
        while weighed < level:
            remaining *= 1.0 - hits[buckets[weighed]] / tries[buckets[weighed]]
            weighed += 1
        if remaining < min_mass:
            break
    return level
