"""The learned table of one session: successor weights per context, over a base table (ADED, Algorithm 2).

A row starts as the base table's distribution of its context. Emitted tokens raise its weights, and the target's
distributions at verified nodes are blended into it. Memory is bounded: the table uses open addressing and evicts the
least recently updated row of a short probe window. Results are deterministic.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.drafters.kernel import kernel
from outrider.drafters.tables.base_table import PROBABILITY_UNIT, BaseArrays, context_key, find

# A probe window has this many slots.
PROBES = 8


class LearnedRows(NamedTuple):
    """The session's rows. An empty slot has key 0; a used slot stores its context's key + 1."""

    keys: NDArray[np.uint64]  # [C], C a power of two
    stamps: NDArray[np.int64]  # [C]; time of the last update
    tokens: NDArray[np.int32]  # [C, S]; -1 = none
    weights: NDArray[np.float32]  # [C, S]; the base table's probabilities plus increments
    missing: NDArray[np.float32]  # [C]; weight of successors that are not in the row
    clock: NDArray[np.int64]  # [1]; number of updates


def new_rows(capacity: int, successors: int) -> LearnedRows:
    """Empty rows for `capacity` contexts (rounded up to a power of two) of `successors` tokens each."""
    size = 1 << max(4, (capacity - 1).bit_length())
    return LearnedRows(
        keys=np.zeros(size, np.uint64),
        stamps=np.zeros(size, np.int64),
        tokens=np.full((size, successors), -1, np.int32),
        weights=np.zeros((size, successors), np.float32),
        missing=np.ones(size, np.float32),
        clock=np.zeros(1, np.int64),
    )


@kernel
def _home(rows: LearnedRows, key: np.uint64) -> np.int64:
    """The first slot of the key's probe window."""
    mixed = key * np.uint64(0x9E3779B97F4A7C15)
    # np.int64, not int(): numba's int() of an unsigned stays unsigned, and unsigned plus signed is a float.
    return np.int64((mixed >> np.uint64(32)) & np.uint64(len(rows.keys) - 1))


@kernel
def locate(rows: LearnedRows, key: np.uint64) -> int:
    """The slot of the context with `key`, or -1."""
    home = _home(rows, key)
    for probe in range(PROBES):
        slot = (home + probe) & (len(rows.keys) - 1)
        if rows.keys[slot] == key + np.uint64(1):
            return slot
    return -1


@kernel
def _claim(base: BaseArrays, rows: LearnedRows, key: np.uint64) -> int:
    """Claims a free or the least recently updated slot of the probe window; returns it, filled from the base table."""
    home = _home(rows, key)
    best = home
    for probe in range(PROBES):
        slot = (home + probe) & (len(rows.keys) - 1)
        if rows.keys[slot] == 0:
            best = slot
            break
        if rows.stamps[slot] < rows.stamps[best]:
            best = slot
    rows.keys[best] = key + np.uint64(1)
    rows.tokens[best, :] = -1
    rows.weights[best, :] = 0.0
    rest = 1.0
    context = find(base, key)
    if context >= 0:
        start = base.offsets[context]
        for i in range(min(base.offsets[context + 1] - start, rows.tokens.shape[1])):
            weight = base.probabilities[start + i] / PROBABILITY_UNIT
            rows.tokens[best, i] = base.tokens[start + i]
            rows.weights[best, i] = weight
            rest -= weight
    rows.missing[best] = max(rest, 0.0)
    return best


@kernel
def _touch(base: BaseArrays, rows: LearnedRows, key: np.uint64) -> int:
    """Finds or claims the context's slot and stamps it with the time of this update; returns the slot."""
    slot = locate(rows, key)
    if slot < 0:
        slot = _claim(base, rows, key)
    rows.clock[0] += 1
    rows.stamps[slot] = rows.clock[0]
    return slot


@kernel
def raise_weight(base: BaseArrays, rows: LearnedRows, key: np.uint64, token: int, increment: float, maximum: float) -> None:
    """Raises one successor's weight by `increment`, up to `maximum`; adds the successor if it is new (Algorithm 2)."""
    slot = _touch(base, rows, key)
    place = _place(rows, slot, token)
    rows.weights[slot, place] = min(rows.weights[slot, place] + increment, maximum)


@kernel
def learn(
    base: BaseArrays,
    rows: LearnedRows,
    text: NDArray[np.int32],
    fresh: int,
    order: int,
    increment: float,
    maximum: float,
    shortest: int = 2,
) -> None:
    """Raises all n-grams of `shortest` to `order` tokens that end in the last `fresh` tokens of `text`, int32 [T]."""
    for i in range(max(1, len(text) - fresh), len(text)):
        if shortest <= 2:
            raise_weight(base, rows, context_key(-1, -1, text[i - 1]), text[i], increment, maximum)
        if i >= 2 and order >= 3 and shortest <= 3:
            raise_weight(base, rows, context_key(-1, text[i - 2], text[i - 1]), text[i], increment, maximum)
        if i >= 3 and order >= 4:
            key = context_key(text[i - 3], text[i - 2], text[i - 1])
            raise_weight(base, rows, key, text[i], increment, maximum)


@kernel
def absorb(
    base: BaseArrays,
    rows: LearnedRows,
    text: NDArray[np.int32],
    tokens: NDArray[np.int32],
    parents: NDArray[np.int32],
    ids: NDArray[np.int32],
    probabilities: NDArray[np.float32],
    order: int,
) -> None:
    """Blends the target's distribution at every node of a verified tree, rejected nodes included, into the rows.

    `text` is int32 [3], the last committed tokens (-1 = none); `tokens` and `parents` are the tree's, [N]; `ids` and
    `probabilities` are the target's likeliest tokens at the root and at each node, [N+1, K]. The longest context, of
    `order` - 1 tokens, takes the target's distribution; shorter contexts occur in many places and move half-way.
    """
    for row in range(len(ids)):
        before, previous, last = text[0], text[1], text[2]
        if row > 0:
            above = parents[row - 1]
            upper = parents[above] if above >= 0 else -2
            before = tokens[upper] if upper >= 0 else last if above >= 0 else previous
            previous = tokens[above] if above >= 0 else last
            last = tokens[row - 1]
        for length in range(1, order):
            key = context_key(-1, -1, last)
            if length == 2:
                key = context_key(-1, previous, last)
            elif length == 3:
                key = context_key(before, previous, last)
            if (length < 2 or previous >= 0) and (length < 3 or before >= 0):
                _blend(base, rows, key, ids[row], probabilities[row], 1.0 if length == order - 1 else 0.5)


@kernel
def _blend(
    base: BaseArrays,
    rows: LearnedRows,
    key: np.uint64,
    ids: NDArray[np.int32],
    probabilities: NDArray[np.float32],
    share: float,
) -> None:
    """Moves the context's row towards a distribution: (1 - share) * row + share * `probabilities`."""
    slot = _touch(base, rows, key)
    scale = (1.0 - share) / _total(rows, slot)
    for i in range(rows.tokens.shape[1]):
        rows.weights[slot, i] *= scale
    for k in range(min(len(ids), rows.tokens.shape[1])):
        place = _place(rows, slot, ids[k])
        rows.weights[slot, place] += share * probabilities[k]
    total = 0.0
    for i in range(rows.tokens.shape[1]):
        total += rows.weights[slot, i]
    rows.missing[slot] = max(0.0, 1.0 - total)


@kernel
def _total(rows: LearnedRows, slot: int) -> float:
    """The weight of all successors, missing ones included."""
    total = rows.missing[slot]
    for i in range(rows.tokens.shape[1]):
        total += rows.weights[slot, i]
    return total


@kernel
def _place(rows: LearnedRows, slot: int, token: int) -> int:
    """The token's column in the row: its own, a free one, or the lightest, whose token is evicted."""
    lightest = 0
    for i in range(rows.tokens.shape[1]):
        if rows.tokens[slot, i] == token:
            return i
        if rows.tokens[slot, i] < 0:
            lightest = i
            break
        if rows.weights[slot, i] < rows.weights[slot, lightest]:
            lightest = i
    rows.tokens[slot, lightest] = token
    rows.weights[slot, lightest] = 0.0
    return lightest


@kernel
def _collect(
    base: BaseArrays,
    rows: LearnedRows,
    key: np.uint64,
    share: float,
    tokens: NDArray[np.int32],
    probabilities: NDArray[np.float32],
    size: int,
) -> tuple[int, float]:
    """Adds the context's successors, scaled by `share`, to the list; returns its size and the remaining mass."""
    slot = locate(rows, key)
    first = size
    remaining = share
    if slot >= 0:
        total = _total(rows, slot)
        for i in range(rows.tokens.shape[1]):
            if rows.tokens[slot, i] < 0:
                break
            size, remaining = _put(
                tokens, probabilities, first, size, remaining, rows.tokens[slot, i], share * rows.weights[slot, i] / total
            )
        return size, remaining
    context = find(base, key)
    if context >= 0:
        for i in range(base.offsets[context], base.offsets[context + 1]):
            weight = base.probabilities[i] / PROBABILITY_UNIT
            size, remaining = _put(tokens, probabilities, first, size, remaining, np.int32(base.tokens[i]), share * weight)
    return size, remaining


@kernel
def _put(
    tokens: NDArray[np.int32],
    probabilities: NDArray[np.float32],
    first: int,
    size: int,
    remaining: float,
    token: int,
    probability: float,
) -> tuple[int, float]:
    """Adds one successor, or its mass if a longer context (entries before `first`) already listed it."""
    for i in range(first):
        if tokens[i] == token:
            probabilities[i] += probability
            return size, remaining - probability
    if size < len(tokens):
        tokens[size] = token
        probabilities[size] = probability
        size += 1
    return size, remaining - probability


@kernel
def successors(
    base: BaseArrays,
    rows: LearnedRows,
    before: int,
    previous: int,
    last: int,
    order: int,
    tokens: NDArray[np.int32],
    probabilities: NDArray[np.float32],
) -> int:
    """P(. | before, previous, last) into `tokens` and `probabilities`, likeliest first, up to their size; returns the number.

    Backs off from contexts of `order` - 1 tokens down to one: a row's missing mass is distributed by the row of the next
    shorter context. Ties keep table order.
    """
    size, remaining = 0, 1.0
    if order >= 4 and before >= 0:
        size, remaining = _collect(base, rows, context_key(before, previous, last), remaining, tokens, probabilities, size)
    if order >= 3 and previous >= 0 and remaining > 0.0:
        size, remaining = _collect(base, rows, context_key(-1, previous, last), remaining, tokens, probabilities, size)
    if remaining > 0.0:
        size, remaining = _collect(base, rows, context_key(-1, -1, last), remaining, tokens, probabilities, size)
    for i in range(1, size):  # insertion sort: short, nearly sorted
        token, probability = tokens[i], probabilities[i]
        j = i
        while j > 0 and probabilities[j - 1] < probability:
            tokens[j], probabilities[j] = tokens[j - 1], probabilities[j - 1]
            j -= 1
        tokens[j], probabilities[j] = token, probability
    return size
