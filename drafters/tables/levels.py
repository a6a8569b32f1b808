"""Levels: the successors that each source lists for a context, longest context first.

A *level* is a source and a context length, for example "the corpus after the last 3 tokens", "the session after the last
5", "the span that the session copies", "the tri-gram table" or "the client's prediction". It lists successors t with shares
q(t). A table gives the trust in a level by source, context length, number of occurrences and diversity of successors.
`outrider.drafters.tables.mixture` interpolates the levels into one distribution.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.drafters.native.library import native, structure, zeros
from outrider.drafters.tables.contexts import LENGTHS, Contexts, Sources
from outrider.drafters.tables.history import MAX_RECENT
from outrider.drafters.tables.suffix import DENSE

CORPUS, SESSION, TABLE, PREDICTION, COPY = range(5)
# Contexts share a bucket of trust by how often they occurred.
SIZE_EDGES = (1, 2, 3, 5, 9, 20, 100)
# Buckets also differ by the distinct successors per occurrence, if a context has several.
DIVERSITY_EDGES = (0.0, 0.125, 0.25, 0.5, 0.75)
SIZES, DIVERSITIES = len(SIZE_EDGES) + 1, len(DIVERSITY_EDGES) + 1
BUCKETS = 5 * LENGTHS * SIZES * DIVERSITIES
# This is subtracted from each count, for contexts that occurred more than once (absolute discounting).
DISCOUNT = 0.5
MAX_SUCCESSORS = 512


@structure
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
    sizes = {"tokens": width, "counts": width, "starts": levels + 1, "index_of": vocabulary}
    sizes |= dict.fromkeys(("out", "probability", "out_length", "out_source", "out_agreement"), MAX_SUCCESSORS)
    sizes |= {"recent_tokens": MAX_RECENT, "recent_counts": MAX_RECENT, "row_tokens": row, "row_probabilities": row}
    return zeros(Scratch, levels, **sizes, recent=np.full(3, -1, np.int64))


@native
def levels(sources: Sources, contexts: Contexts, row: int, scratch: Scratch, min_mass: float) -> int:
    """Lists the levels of a context, longest first, until less than `min_mass` mass remains; returns their number.

    A session level is skipped if the next longer one had as many occurrences, a corpus level if the next longer range is
    the same: it would repeat the same successors.
    """
