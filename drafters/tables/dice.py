"""The dice: the target's noise, which is known before its forward, as evidence of the tokens that it will choose.

Under the `keyed` rule the target takes argmax(log p + G), where the Gumbel noise G depends on the request's seed, the position
and the token alone. A table's estimate of p has errors, so a token's estimated probability is multiplied by exp(G / 2), which
trusts the noise half as much as an exact estimate would (chosen on SmolLM2's answers to 24 questions of Spec-Bench), and
renormalised. Tokens that no table lists are chosen almost only where their noise is large: the *lucky* tokens of a position,
the same after any text.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.drafters.interface import Ints, Sampling
from outrider.drafters.kernel import kernel
from outrider.drafters.noise import mix
from outrider.drafters.tables.nodes import Nodes

LUCKY = 8
# Lucky ids are below this. In most vocabularies, frequent tokens have small ids.
LUCKY_IDS = 4096
# In Zipf-Mandelbrot's law, a token's frequency is about 1 / (id + offset).
RANK_OFFSET = 300.0
# The lucky tokens of this many positions are kept.
POSITIONS = 64
# This is the mean of exp(G / 2).
MEAN_FACTOR = math.sqrt(math.pi)
# This bounds the factors that make a token worth looking up. One in 800 is larger.
MAX_FACTOR = 16.0
# From this temperature on, the noise has its full weight.
FULL_TEMPERATURE = 0.8
# At temperature 1, lucky tokens have this share of the unlisted tokens' probability.
LUCKY_SHARE = 0.16
# This much probability is left for tokens that no table lists.
MIN_UNLISTED = 0.01
MAX_PROBABILITY = 0.999


class Dice(NamedTuple):
    """The noise of a request."""

    seed: np.uint64  # mixed
    position: int  # position of the next token in the answer
    strength: float  # weight of the noise's factor, in [0, 1]; 0 = the noise is not used
    luck: float  # probability that a token which no table lists is a lucky one
    ids: int  # lucky tokens have smaller ids
    lucky: NDArray[np.float64]  # [POSITIONS, 1 + 2 * LUCKY]; a position, its lucky tokens, and their shares


def new_dice() -> Dice:
    """The dice of a greedy request: unused."""
    return Dice(np.uint64(0), 0, 0.0, 0.0, 0, np.full((POSITIONS, 1 + 2 * LUCKY), -1.0))


def throw(dice: Dice, sampling: Sampling | None, prompt: Ints) -> Dice:
    """The dice of a request. They are unused if the target is greedy or has another acceptance rule.

    With filters a token that no table lists is rarely kept, so none is lucky. Lucky ids are not above those of the prompt
    (int32 [P]), so the target has them all.
    """
    dice.lucky[:, 0] = -1.0
    if sampling is None or sampling.greedy or sampling.rule != "keyed" or sampling.top_k == 1:
        return dice._replace(strength=0.0, luck=0.0)
    luck = 0.0 if sampling.filters else LUCKY_SHARE * min(1.0, sampling.temperature) ** 2
    strength = min(1.0, sampling.temperature / FULL_TEMPERATURE)
    ids = min(LUCKY_IDS, 1 + int(prompt.max(initial=-1)))
    return dice._replace(seed=np.uint64(mix(sampling.seed)), strength=strength, luck=luck, ids=ids)


@kernel
def position_key(seed: np.uint64, position: int) -> np.uint64:
    """`outrider.drafters.noise.position_key` of a mixed seed."""
    return _scramble((seed ^ np.uint64(position) * np.uint64(0xD1B54A32D192ED03)) + np.uint64(0x9E3779B97F4A7C15))


@kernel
def random_bits(key: np.uint64, token: int) -> np.uint64:
    """The 53 random bits behind the target's noise of a token."""
    return _scramble(np.uint64(token) * np.uint64(0x9E3779B97F4A7C15) + key) >> np.uint64(11)


@kernel
def _scramble(x: np.uint64) -> np.uint64:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@kernel
def exponential(bits: np.uint64) -> float:
    """exp(-G), for the Gumbel noise G of these bits."""
    return -math.log((np.float64(bits) + 0.5) * 2.0**-53)


@kernel
def factor_of(dice: Dice, key: np.uint64, token: int) -> float:
    """The factor of a token's probability by its noise, with mean 1; `key` is its position's."""
    return 1.0 + dice.strength * (1.0 / (MEAN_FACTOR * math.sqrt(exponential(random_bits(key, token)))) - 1.0)


@kernel
def weigh(
    dice: Dice, depth: int, tokens: NDArray[np.int64], probability: NDArray[np.float64], found: int, least: float
) -> float:
    """Multiplies the probabilities of `found` tokens after a node at `depth` by their noise's factor and renormalises them.

    The noise of tokens that stay below `least` is not computed. Returns the probability of all tokens that are not listed.
    """
    key = position_key(dice.seed, dice.position + depth)
    listed, total = 0.0, 0.0
    for x in range(found):
        listed += probability[x]
        if probability[x] * MAX_FACTOR > least:
            probability[x] *= factor_of(dice, key, tokens[x])
        total += probability[x]
    unlisted = max(MIN_UNLISTED, 1.0 - listed)
    scale = 1.0 / (total + unlisted)
    for x in range(found):
        probability[x] = min(MAX_PROBABILITY, scale * probability[x])
    return unlisted * scale


@kernel
def weigh_children(dice: Dice, nodes: Nodes, first: int, size: int) -> None:
    """Multiplies the path probabilities of nodes [first, size), all children of one node, by their noise's factor.

    They are renormalised together with what the parent leaves to other tokens.
    """
    if dice.strength == 0.0 or first == size:
        return
    parent = nodes.parents[first]
    above, key = np.float64(nodes.path[parent]), position_key(dice.seed, dice.position + nodes.depths[parent])
    listed, total = 0.0, 0.0
    for child in range(first, size):
        listed += nodes.path[child]
        nodes.path[child] *= factor_of(dice, key, nodes.tokens[child])
        total += nodes.path[child]
    scale = above / max(1e-30, total + max(MIN_UNLISTED * above, above - listed))
    for child in range(first, size):
        nodes.path[child] *= scale


@kernel
def weigh_tree(dice: Dice, nodes: Nodes, size: int, scratch: NDArray[np.float64]) -> None:
    """`weigh_children` for the children of each of the first `size` nodes, which may be anywhere among them.

    `scratch` is float64 [3, P], P >= size.
    """
    if dice.strength == 0.0:
        return
    share, listed, total = scratch[0], scratch[1], scratch[2]
    scratch[1:, :size] = 0.0
    for node in range(1, size):
        parent = nodes.parents[node]
        share[node] = nodes.path[node] / max(1e-30, np.float64(nodes.path[parent]))
        listed[parent] += share[node]
        share[node] *= factor_of(dice, position_key(dice.seed, dice.position + nodes.depths[parent]), nodes.tokens[node])
        total[parent] += share[node]
    for node in range(1, size):
        parent = nodes.parents[node]
        nodes.path[node] = nodes.path[parent] * share[node] / (total[parent] + max(MIN_UNLISTED, 1.0 - listed[parent]))


@kernel
def lucky_row(dice: Dice, depth: int) -> int:
    """The row of `dice.lucky` for the tokens after a node at `depth`, which is filled once per position."""
    position = dice.position + depth
    row = position % POSITIONS
    if dice.lucky[row, 0] != position:
        dice.lucky[row, 0] = position
        _find_lucky(position_key(dice.seed, position), dice.ids, dice.lucky[row, 1:])
    return row


@kernel
def _find_lucky(key: np.uint64, size: int, lucky: NDArray[np.float64]) -> None:
    """Ranks the token ids below `size` by their frequency times exp(G): the first LUCKY ids, then their shares.

    Only about 8 * LUCKY ids, those with the largest noise, are ranked; an id that is left out would hardly ever be among the
    first.
    """
    lucky[:] = 0.0
    least = np.uint64(2.0**53 * math.exp(-8.0 * LUCKY / max(1, size)))
    total = 1e-300
    for token in range(size):
        bits = random_bits(key, token)
        if bits < least:
            continue
        weight = 1.0 / ((token + RANK_OFFSET) * exponential(bits))
        place = LUCKY
        while place > 0 and lucky[LUCKY + place - 1] < weight:
            if place < LUCKY:
                lucky[place], lucky[LUCKY + place] = lucky[place - 1], lucky[LUCKY + place - 1]
            place -= 1
        if place < LUCKY:
            lucky[place], lucky[LUCKY + place] = token, weight
    for i in range(LUCKY, 2 * LUCKY):
        total += lucky[i]
    for i in range(LUCKY, 2 * LUCKY):
        lucky[i] /= total
