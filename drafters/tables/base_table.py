"""The base n-gram table of ADED (Eq. 1): the likeliest successors of contexts of one and two tokens in a corpus.

The table is read-only, memory-mapped and looked up by the compiled library; the builder counts a corpus in blocks. What a
session learns is in `outrider.drafters.tables.learned_table`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.drafters.native.library import structure
from outrider.drafters.tables import array_file
from outrider.drafters.tables.array_file import ArrayFileError

KIND = "ngram"
# A token id has at most this many bits. The largest vocabularies in use need 18.
TOKEN_BITS = 21
# Probabilities are stored as uint16 multiples of 1 / PROBABILITY_UNIT.
PROBABILITY_UNIT = 65535.0


@structure
class BaseArrays(NamedTuple):
    """The table's arrays. Keys are sorted; the successors of context i are offsets[i] to offsets[i + 1]."""

    keys: NDArray[np.uint64]  # [C]
    offsets: NDArray[np.uint32]  # [C+1]
    tokens: NDArray[Any]  # uint16 or uint32 [S], likeliest first within a context
    probabilities: NDArray[np.uint16]  # [S], in units of 1 / PROBABILITY_UNIT

    def __deepcopy__(self, memo: dict[int, Any]) -> BaseArrays:
        """Itself: the arrays are read-only, and all sessions share them."""
        return self


def empty_base() -> BaseArrays:
    return BaseArrays(np.empty(0, np.uint64), np.zeros(1, np.uint32), np.empty(0, np.uint16), np.empty(0, np.uint16))


def load(path: Path, fingerprint: str | None = None, vocabulary: int | None = None) -> BaseArrays:
    """Maps the table at `path`. Raises ArrayFileError if it is unusable or was built with another tokenizer.

    Also refuses a table with token ids that are not below `vocabulary` (None = any).
    """
    arrays = array_file.load(path, KIND, fingerprint).arrays
    try:
        base = BaseArrays(arrays["keys"], arrays["offsets"], arrays["tokens"], arrays["probabilities"])
    except KeyError:
        raise ArrayFileError(f"{path} lacks arrays of an n-gram table; rebuild it with `outrider datastore build`.") from None
    # The library checks no bounds, so the arrays must be consistent.
    consistent = len(base.offsets) == len(base.keys) + 1 and base.offsets[-1] == len(base.tokens) == len(base.probabilities)
    if not consistent or np.any(base.offsets[1:] < base.offsets[:-1]):
        raise ArrayFileError(f"{path} is damaged; build it again with `outrider datastore build`.")
    if vocabulary is not None and base.tokens.max(initial=0) >= vocabulary:
        raise ArrayFileError(f"{path} has token ids that this model lacks; build it again with this model's tokenizer.")
    return base


@dataclass
class Counts:
    """Counts of (context, successor) pairs, sorted; the context's key is in the high bits, the successor in the low ones."""

    pairs: NDArray[np.uint64]  # [P]
    counts: NDArray[np.int64]  # [P]

    def add(self, other: Counts) -> Counts:
        pairs, inverse = np.unique(np.concatenate([self.pairs, other.pairs]), return_inverse=True)
        counts = np.bincount(inverse, np.concatenate([self.counts, other.counts]), len(pairs)).astype(np.int64)
        return Counts(pairs, counts)


def count(tokens: NDArray[Any], separator: int) -> Counts:
    """Counts the n-grams of two and three tokens in `tokens` (any integer [T]) that do not cross a `separator`."""
    wide = tokens.astype(np.uint64)
    bits = np.uint64(TOKEN_BITS)
    boundary = wide == np.uint64(separator)
    pairs = ((wide[:-1] << bits) | wide[1:])[~boundary[:-1]]
    keys = (wide[:-2] + np.uint64(1)) << bits | wide[1:-1]
    triples = (keys << bits | wide[2:])[~(boundary[:-2] | boundary[1:-1])]
    return Counts(*np.unique(np.concatenate([pairs, triples]), return_counts=True))


def build(path: Path, blocks: Iterable[NDArray[Any]], fingerprint: str, separator: int, successors: int = 12) -> int:
    """Builds the table at `path` from blocks of tokens; returns the number of contexts.

    `successors` is the paper's t, the number kept per context (Appendix F). The share of those that are not kept becomes the
    context's missing mass.
    """
    total = Counts(np.empty(0, np.uint64), np.empty(0, np.int64))
    for block in blocks:
        total = total.add(count(block, separator))
    arrays = _table(total, successors, separator)
    array_file.save(path, KIND, fingerprint, arrays._asdict(), successors=str(successors))
    return len(arrays.keys)


def _table(total: Counts, successors: int, separator: int) -> BaseArrays:
    """The `successors` most frequent successors of each context.

    The end of a text is not a successor; its share becomes part of the context's missing mass.
    """
    keys = total.pairs >> np.uint64(TOKEN_BITS)
    tokens = (total.pairs & np.uint64((1 << TOKEN_BITS) - 1)).astype(np.int64)
    unique, inverse, sizes = np.unique(keys, return_inverse=True, return_counts=True)
    mass = np.bincount(inverse, total.counts)
    # Ties go to the smaller token, so that builds are reproducible.
    order = np.lexsort((tokens, -total.counts, inverse))
    rank = np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    kept = order[(rank < successors) & (tokens[order] != separator)]
    share = total.counts[kept] / mass[inverse[kept]]
    contexts, lengths = np.unique(inverse[kept], return_counts=True)
    width = np.uint16 if tokens.size == 0 or tokens.max() < 1 << 16 else np.uint32
    return BaseArrays(
        unique[contexts],
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.uint32),
        tokens[kept].astype(width),
        np.maximum(1, np.floor(share * PROBABILITY_UNIT)).astype(np.uint16),
    )
