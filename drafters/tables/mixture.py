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
from drafters.tables.levels import LENGTHS, LISTED, SESSION, Knowledge, States, Work, advance, levels

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
def predict(known: Knowledge, states: States, row: int, work: Work, least: float) -> int:
    """P(. | the context of `row`) into `work.out` and `work.probability`, unsorted; returns how many tokens."""
    count = levels(known, states, row, work, least)
    tokens, counts, where, out = work.tokens, work.counts, work.where, work.out
    probability, agreed = work.probability, work.agreed
    size, left = 0, 1.0
    for level in range(count):
        trust = known.hits[work.buckets[level]] / known.tries[work.buckets[level]]
        share = left * trust / work.norms[level]
        discount, mark = work.discounts[level], work.marks[level]
        bit = mark % 4 + 1 if mark % 4 <= SESSION else 0
        for i in range(work.starts[level], work.starts[level + 1]):
            token = tokens[i]
            x = where[token]
            if x >= size or out[x] != token:
                if size == LISTED:
                    continue
                x = size
                size += 1
                where[token], out[x], probability[x] = x, token, 0.0
                work.out_mark[x], agreed[x] = mark, 0
            agreed[x] |= bit
            probability[x] += share * (counts[i] - discount)
        left *= 1.0 - trust
    return size


@kernel
def cell(work: Work, x: int) -> int:
    """The boost table's entry for the token at `x` of the last prediction: who listed it, and its power of two."""
    power = max(0, min(POWERS - 1, -math.frexp(work.probability[x])[1]))
    return (work.out_mark[x] // 4 * 4 + work.agreed[x]) * POWERS + power


@kernel
def commit(known: Knowledge, states: States, work: Work, token: int) -> float:
    """Takes one token of text into row 0 and the history; shares it out to the levels that foresaw it (online EM).

    Returns the natural logarithm of the probability that the mixture gave the token.
    """
    count = levels(known, states, 0, work, LEAST_MASS)
    probability = 1e-6
    for level in range(count - 1, -1, -1):
        q = 0.0
        for i in range(work.starts[level], work.starts[level + 1]):
            if work.tokens[i] == token:
                q = (work.counts[i] - work.discounts[level]) / work.norms[level]
                break
        entry = work.buckets[level]
        trust = known.hits[entry] / known.tries[entry]
        mixed = trust * q + (1.0 - trust) * probability
        known.hits[entry] += trust * q / mixed
        known.tries[entry] += 1.0
        probability = mixed
    append(known.history, states.hashes[0], token)
    advance(known, states, 0, token, 0)
    return np.log(probability)
