"""Two searches for likely continuations: best-first by path probability, and ADED's Monte Carlo tree search.

Both grow a `Pool` of nodes from the session's tri-gram distribution, and mark the nodes of a draft.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.drafters.native.library import native, structure, zeros
from outrider.drafters.tables.base_table import BaseArrays
from outrider.drafters.tables.dice import Dice
from outrider.drafters.tables.learned_table import LearnedRows
from outrider.drafters.tables.nodes import Nodes, new_nodes


@structure
class Trigrams(NamedTuple):
    """The session's n-gram distribution: a base table, the session's rows over it, and the order."""

    base: BaseArrays
    rows: LearnedRows
    order: int  # n-grams of 2 to `order` tokens


@structure
class Pool(NamedTuple):
    """Search nodes, and a buffer."""

    nodes: Nodes  # [P]
    row_tokens: NDArray[np.int32]  # [S]; buffer for one successor list
    row_probabilities: NDArray[np.float32]  # [S]


def new_pool(nodes: int, row: int) -> Pool:
    """Room for `nodes` search nodes with at most `row` children each."""
    return zeros(Pool, row, nodes=new_nodes(nodes))


@structure
class Visits(NamedTuple):
    """What its visits gave each search node; a node's children are contiguous, likeliest first."""

    first_child: NDArray[np.int32]  # [P]; 0 = not expanded
    children: NDArray[np.int32]  # [P]; number of children
    prior: NDArray[np.float32]  # [P]; probability given the parent: P(s, a) of Eq. 2
    counts: NDArray[np.int32]  # [P]; N(s, a)
    reward: NDArray[np.float64]  # [P]; sum over visits, so Q(s, a) = reward / counts


def new_visits(nodes: int) -> Visits:
    return zeros(Visits, nodes)


@native
def best_first(
    trigrams: Trigrams, pool: Pool, text: NDArray[np.int32], depth: int, budget: int, floor: float, dice: Dice
) -> int:
    """Marks the `budget` likeliest nodes of up to `depth` tokens and at least `floor` path probability; returns the size.

    `text` has the last three tokens, -1 = none.
    """


@native
def monte_carlo(
    trigrams: Trigrams,
    pool: Pool,
    visits: Visits,
    text: NDArray[np.int32],
    depth: int,
    iterations: int,
    candidates: int,
    c1: float,
    c2: float,
    random: NDArray[np.uint64],
    dice: Dice,
) -> int:
    """Algorithm 1: marks the `candidates` best continuations of up to `depth` tokens; returns the pool's size.

    Two differences from the authors' code: the reward is the path's own probability, normalised by its length (theirs
    looks up the wrong word, so every reward is about 1), and ties go to the likelier token instead of hash order.
    """
