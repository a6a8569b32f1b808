"""P(next token) from counts alone: all levels of a context, interpolated by learned trust.

Over the levels i that `outrider.drafters.tables.levels` lists, longest context first,

    P(t) = sum_i  trust_i * prod_{j before i} (1 - trust_j) * q_i(t).

The prior of the trust table was fitted once on held-out documents of a corpus; it holds no text. A session keeps
updating it with every committed token, drafted or not. A linear mixture gives no extra weight to a token on which two
sources agree, so P(t) is multiplied by `boost`, the ratio of measured to predicted frequency in its cell, fitted on the
same documents.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from outrider.drafters.kernel import kernel
from outrider.drafters.tables import array_file
from outrider.drafters.tables.contexts import LENGTHS, Contexts, Sources, advance
from outrider.drafters.tables.history import append, find_copy
from outrider.drafters.tables.levels import COPY, MAX_SUCCESSORS, SESSION, Scratch, levels
from outrider.drafters.tables.suffix import LONGEST_CONTEXT

# Probabilities are divided into cells by powers of two.
POWERS = 12
CELLS = LENGTHS * 4 * POWERS
# The pseudo-count of the fitted trust at the start of a session.
STRENGTH = 8.0
# Shorter contexts are skipped once less mass remains.
MIN_MASS = 1e-3
MAX_BOOST = 6.0
PRIOR_FILE = Path(__file__).parent / "prior.safetensors"


def load_prior() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The fitted trust, float64 [BUCKETS], and boost, float64 [CELLS]. Raises ArrayFileError."""
    arrays = array_file.load(PRIOR_FILE, "prior").arrays
    return arrays["trust"], arrays["boost"]


@kernel
def predict(sources: Sources, contexts: Contexts, row: int, scratch: Scratch, min_mass: float) -> int:
    """P(. | context `row`) into `scratch.out` and `scratch.probability`, unsorted; returns the number of tokens."""
    count = levels(sources, contexts, row, scratch, min_mass)
    tokens, counts, index_of, out = scratch.tokens, scratch.counts, scratch.index_of, scratch.out
    out_length, out_source, probability = scratch.out_length, scratch.out_source, scratch.probability
    agreement = scratch.out_agreement
    size, remaining = 0, 1.0
    for level in range(count):
        trust = sources.hits[scratch.buckets[level]] / sources.tries[scratch.buckets[level]]
        share = remaining * trust / scratch.norms[level]
        discount, source, length = scratch.discounts[level], scratch.level_sources[level], scratch.level_lengths[level]
        bit = SESSION + 1 if source == COPY else source + 1 if source <= SESSION else 0
        for i in range(scratch.starts[level], scratch.starts[level + 1]):
            token = tokens[i]
            x = index_of[token]
            if x >= size or out[x] != token:
                if size == MAX_SUCCESSORS:
                    continue
                x = size
                size += 1
                index_of[token], out[x], probability[x] = x, token, 0.0
                out_length[x], out_source[x], agreement[x] = length, source, 0
            agreement[x] |= bit
            probability[x] += share * (counts[i] - discount)
        remaining *= 1.0 - trust
    return size


@kernel
def cell(scratch: Scratch, x: int) -> int:
    """The boost table's entry for predicted token `x`: by context length, agreement, and power of two of P(t)."""
    power = max(0, min(POWERS - 1, -math.frexp(scratch.probability[x])[1]))
    return (scratch.out_length[x] * 4 + scratch.out_agreement[x]) * POWERS + power


@kernel
def commit(sources: Sources, contexts: Contexts, scratch: Scratch, token: int) -> float:
    """Appends a token to row 0 and the history, and updates the trust of every level.

    Trust is the mean of a level's responsibilities: the probability that it, and no shorter context, gave the token. All tokens
    count, also those that a longer context gave; EM would weigh each by the probability that the level was reached.

    Returns the natural logarithm of the probability that the mixture gave the token.
    """
    count = levels(sources, contexts, 0, scratch, MIN_MASS)
    probability = 1e-6
    for level in range(count - 1, -1, -1):
        q = 0.0
        for i in range(scratch.starts[level], scratch.starts[level + 1]):
            if scratch.tokens[i] == token:
                q = (scratch.counts[i] - scratch.discounts[level]) / scratch.norms[level]
                break
        entry = scratch.buckets[level]
        trust = sources.hits[entry] / sources.tries[entry]
        mixed = trust * q + (1.0 - trust) * probability
        sources.hits[entry] += trust * q / mixed
        sources.tries[entry] += 1.0
        probability = mixed
    append(sources.history, contexts.hashes[0], token)
    advance(sources, contexts, 0, token, 0)
    find_copy(sources.history, contexts.hashes[0, LONGEST_CONTEXT], contexts.last[0, 2:])
    return np.log(probability)
