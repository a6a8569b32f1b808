"""Searches likely continuations in the session's tri-gram distribution, best-first by path probability."""

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


@native
def best_first(
    trigrams: Trigrams, pool: Pool, text: NDArray[np.int32], depth: int, budget: int, floor: float, dice: Dice
) -> int:
    """Marks the `budget` likeliest nodes of up to `depth` tokens and at least `floor` path probability; returns the size.

    `text` has the last three tokens, -1 = none.
    """
