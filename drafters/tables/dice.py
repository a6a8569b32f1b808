"""The dice: the target's noise, which is known before its forward, as evidence of the tokens that it will choose.

Under the `keyed` rule the target takes argmax(log p + G), where the Gumbel noise G depends on the request's seed, the position
and the token alone. A table's estimate of p has errors, so a token's estimated probability is multiplied by exp(G / 2), which
trusts the noise half as much as an exact estimate would (chosen on SmolLM2's answers to 24 questions of Spec-Bench), and
renormalised. Tokens that no table lists are chosen almost only where their noise is large: the *lucky* tokens of a position,
the same after any text.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.drafters.interface import Ints, Sampling
from outrider.drafters.native.library import native, structure
from outrider.drafters.noise import mix
from outrider.drafters.tables.nodes import Nodes

LUCKY = 8
# Lucky ids are below this. In most vocabularies, frequent tokens have small ids.
LUCKY_IDS = 4096
# The lucky tokens of this many positions are kept.
POSITIONS = 64
# From this temperature on, the noise has its full weight.
FULL_TEMPERATURE = 0.8
# At temperature 1, lucky tokens have this share of the unlisted tokens' probability.
LUCKY_SHARE = 0.16


@structure
class Dice(NamedTuple):
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


def at(dice: Dice, position: int) -> Dice:
    """The dice where the next token has this position in the answer; itself if they are unused."""
    return dice._replace(position=position) if dice.strength else dice


@native
def weigh_tree(dice: Dice, nodes: Nodes, size: int, scratch: NDArray[np.float64]) -> None:
    """`weigh_children` for the children of each of the first `size` nodes, which may be anywhere among them.

    `scratch` is float64 [3, P], P >= size.
    """
