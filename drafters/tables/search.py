"""Two searches for likely continuations: ADED's Monte Carlo tree search, and best-first search by path probability.

Both grow a `Pool` of nodes from the session's tri-gram distribution and mark the nodes of a draft. They are
deterministic for given tables and seed, and use memory that does not grow with the text.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.drafters.native.library import native, structure
from outrider.drafters.tables.base_table import BaseArrays
from outrider.drafters.tables.dice import Dice
from outrider.drafters.tables.learned_table import LearnedRows
from outrider.drafters.tables.nodes import Nodes, new_nodes

# How continuations are ranked: by path probability, by the sum of their visits' rewards, or nodes by their visits.
RANKINGS = ("path", "score", "visits")
PATH, SCORE, VISITS = range(3)


@structure
class Trigrams(NamedTuple):
    """The session's n-gram distribution: a base table, the session's rows over it, and the order."""

    base: BaseArrays
    rows: LearnedRows
    order: int  # n-grams of 2 to `order` tokens


@structure
class Pool(NamedTuple):
    """Search nodes; a node's children are contiguous, likeliest first."""

    nodes: Nodes  # [P]
    first_child: NDArray[np.int32]  # [P]; 0 = not expanded
    children: NDArray[np.int32]  # [P]; number of children
    prior: NDArray[np.float32]  # [P]; probability given the parent: P(s, a) of Eq. 2
    visits: NDArray[np.int32]  # [P]; N(s, a)
    reward: NDArray[np.float64]  # [P]; sum over visits, so Q(s, a) = reward / visits
    row_tokens: NDArray[np.int32]  # [S]; buffer for one successor list
    row_probabilities: NDArray[np.float32]  # [S]


def new_pool(nodes: int, row: int) -> Pool:
    """Room for `nodes` search nodes with at most `row` children each."""
    return Pool(
        nodes=new_nodes(nodes),
        first_child=np.zeros(nodes, np.int32),
        children=np.zeros(nodes, np.int32),
        prior=np.zeros(nodes, np.float32),
        visits=np.zeros(nodes, np.int32),
        reward=np.zeros(nodes, np.float64),
        row_tokens=np.zeros(row, np.int32),
        row_probabilities=np.zeros(row, np.float32),
    )


@native
def monte_carlo(
    trigrams: Trigrams,
    pool: Pool,
    text: NDArray[np.int32],
    depth: int,
    iterations: int,
    candidates: int,
    c1: float,
    c2: float,
    random: NDArray[np.uint64],
    ranking: int,
    summed: bool,
) -> int:
    """Algorithm 1: marks the `candidates` best continuations of up to `depth` tokens; returns the pool's size.

    The `ranking` is an index of RANKINGS: SCORE is the paper's; PATH also ranks continuations that no rollout has visited or
    completed; VISITS, as in the authors' code, ranks all nodes, not only the ends of continuations.

    Two differences from the authors' code: the reward is the path's own probability, normalised by its length (theirs
    looks up the wrong word, so every reward is about 1), and ties go to the likelier token instead of hash order.
    """


@native
def best_first(
    trigrams: Trigrams, pool: Pool, text: NDArray[np.int32], depth: int, budget: int, floor: float, width: int, dice: Dice
) -> int:
    """Marks the `budget` likeliest nodes of up to `depth` tokens and at least `floor` path probability; returns the size.

    A node has at most `width` children: 1 is greedy search, which gives a chain.
    """
