"""P(next token) from counts alone: every source that knows the context, interpolated by learned trust.

From the longest context down, over the levels i that know it (`drafters.tables.levels`),

    P(t) = sum_i  trust_i * prod_{j before i} (1 - trust_j) * q_i(t).

The trust table is fitted once by EM on held-out documents of a corpus (`bench/fit.py`; it holds no text) and goes on learning
inside a session from every committed token, whether its level was drafted from or not. A linear mixture cannot say
"two sources agree", so each P(t) is multiplied by `boost`, the measured over the predicted frequency of its kind, fitted
on the same documents.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from drafters.tables import array_file
from drafters.tables.history import append
from drafters.tables.kernel import kernel
from drafters.tables.levels import LENGTHS, LISTED, SESSION, Contexts, Scratch, Sources, advance, levels

POWERS = 12
CELLS = LENGTHS * 4 * POWERS
STRENGTH = 8.0  # tokens that the fitted trust weighs at the start of a session
LEAST_MASS = 1e-3  # shorter contexts are not asked once so little mass is left
MOST_BOOST = 6.0
PRIOR = Path(__file__).parent / "prior.safetensors"


def load_prior() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The fitted trust [BUCKETS] and boost [CELLS]."""
    arrays = array_file.load(PRIOR, "prior").arrays
    return arrays["trust"], arrays["boost"]


@kernel
def predict(sources: Sources, contexts: Contexts, row: int, scratch: Scratch, least: float) -> int:
    """P(. | the context of `row`) into `scratch.out` and `scratch.probability`, unsorted; returns how many tokens."""
    count = levels(sources, contexts, row, scratch, least)
    tokens, counts, where, out = scratch.tokens, scratch.counts, scratch.where, scratch.out
    probability, agreed = scratch.probability, scratch.agreed
    size, left = 0, 1.0
    for level in range(count):
        trust = sources.hits[scratch.buckets[level]] / sources.tries[scratch.buckets[level]]
        share = left * trust / scratch.norms[level]
        discount, mark = scratch.discounts[level], scratch.marks[level]
        bit = mark % 4 + 1 if mark % 4 <= SESSION else 0
        for i in range(scratch.starts[level], scratch.starts[level + 1]):
            token = tokens[i]
            x = where[token]
            if x >= size or out[x] != token:
                if size == LISTED:
                    continue
                x = size
                size += 1
                where[token], out[x], probability[x] = x, token, 0.0
                scratch.out_mark[x], agreed[x] = mark, 0
            agreed[x] |= bit
            probability[x] += share * (counts[i] - discount)
        left *= 1.0 - trust
    return size


@kernel
def cell(scratch: Scratch, x: int) -> int:
    """The boost table's entry for the token at `x` of the last prediction: who listed it, and its power of two."""
    power = max(0, min(POWERS - 1, -math.frexp(scratch.probability[x])[1]))
    return (scratch.out_mark[x] // 4 * 4 + scratch.agreed[x]) * POWERS + power


@kernel
def commit(sources: Sources, contexts: Contexts, scratch: Scratch, token: int) -> float:
    """Takes one token of text into row 0 and the history; shares it out to the levels that foresaw it (online EM).

    Returns the natural logarithm of the probability that the mixture gave the token.
    """
    count = levels(sources, contexts, 0, scratch, LEAST_MASS)
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
    return np.log(probability)
