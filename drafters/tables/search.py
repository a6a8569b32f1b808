"""Two searches for likely continuations: ADED's Monte Carlo tree search, and best-first search by path probability.

Both grow a `Pool` of nodes from the session's tri-gram distribution and mark the nodes of a draft. They are
deterministic for given tables and seed, and use memory that does not grow with the text.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.drafters.interface import Source
from outrider.drafters.kernel import kernel
from outrider.drafters.tables.base_table import BaseArrays
from outrider.drafters.tables.dice import Dice, weigh_children
from outrider.drafters.tables.learned_table import LearnedRows, successors
from outrider.drafters.tables.nodes import Nodes, likeliest_unchosen, new_nodes, reset

# How continuations are ranked: by path probability, by the sum of their visits' rewards, or nodes by their visits.
RANKINGS = ("path", "score", "visits")
PATH, SCORE, VISITS = range(3)


class Trigrams(NamedTuple):
    """The session's n-gram distribution: a base table, the session's rows over it, and the order."""

    base: BaseArrays
    rows: LearnedRows
    order: int  # n-grams of 2 to `order` tokens


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


@kernel
def _restart(pool: Pool, last: int) -> None:
    """Empties the pool and makes node 0 the token `last`."""
    reset(pool.nodes, last)
    pool.first_child[0] = 0
    pool.children[0] = 0
    pool.prior[0] = 1.0
    pool.visits[0] = 0
    pool.reward[0] = 0.0


@kernel
def _context(pool: Pool, node: int, text: NDArray[np.int32]) -> tuple[int, int, int]:
    """The last three tokens at `node`; `text` (int32 [3], -1 = none) ends with node 0's token."""
    last = pool.nodes.tokens[node]
    above = pool.nodes.parents[node]
    if above < 0:
        return text[0], text[1], last
    upper = pool.nodes.parents[above]
    return (text[1] if upper < 0 else pool.nodes.tokens[upper]), pool.nodes.tokens[above], last


@kernel
def _expand(trigrams: Trigrams, pool: Pool, size: int, node: int, text: NDArray[np.int32], width: int) -> int:
    """Appends the `width` likeliest children of `node`; returns the pool's new size."""
    before, previous, last = _context(pool, node, text)
    base, rows, order = trigrams
    found = successors(base, rows, before, previous, last, order, pool.row_tokens, pool.row_probabilities)
    found = min(found, width, len(pool.nodes.tokens) - size)
    pool.first_child[node] = size
    pool.children[node] = found
    for i in range(found):
        child = size + i
        pool.nodes.tokens[child] = pool.row_tokens[i]
        pool.nodes.parents[child] = node
        pool.nodes.depths[child] = pool.nodes.depths[node] + 1
        pool.first_child[child] = 0
        pool.children[child] = 0
        pool.nodes.path[child] = pool.nodes.path[node] * pool.row_probabilities[i]
        pool.prior[child] = pool.row_probabilities[i]
        pool.visits[child] = 0
        pool.reward[child] = 0.0
        pool.nodes.source[child] = Source.TRIGRAM
        pool.nodes.chosen[child] = False
    return size + found


@kernel
def _uniform(state: NDArray[np.uint64]) -> float:
    """The next random number in [0, 1), by xorshift64*."""
    x = state[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    state[0] = x
    return float((x * np.uint64(0x2545F4914F6CDD1D)) >> np.uint64(11)) / 9007199254740992.0


@kernel
def _select(pool: Pool, node: int, c1: float, c2: float) -> int:
    """The child with the highest PUCT score (Eq. 2, with E from Eq. 3)."""
    first = pool.first_child[node]
    total = 0
    for child in range(first, first + pool.children[node]):
        total += pool.visits[child]
    exploration = (c1 + np.log((total + c2 + 1.0) / c2)) * np.sqrt(total)
    best, best_score = first, -1.0
    for child in range(first, first + pool.children[node]):
        quality = pool.reward[child] / pool.visits[child] if pool.visits[child] else 0.0
        score = quality + exploration * pool.prior[child] / (1.0 + pool.visits[child])
        if score > best_score:
            best, best_score = child, score
    return best


@kernel
def _rollout(
    trigrams: Trigrams, pool: Pool, node: int, text: NDArray[np.int32], depth: int, random: NDArray[np.uint64], summed: bool
) -> float:
    """Samples a continuation of `node` down to `depth`; returns the geometric mean of its tokens' probabilities, in (0, 1].

    If `summed`, returns 1 plus the sum of these probabilities, as Algorithm 1 is printed.
    """
    log_probability, total, above = np.log(max(pool.nodes.path[node], 1e-12)), 1.0, node
    while above > 0:
        total += pool.prior[above]
        above = pool.nodes.parents[above]
    length = pool.nodes.depths[node]
    before, previous, last = _context(pool, node, text)
    base, rows, order = trigrams
    while length < depth:
        found = successors(base, rows, before, previous, last, order, pool.row_tokens, pool.row_probabilities)
        if found == 0:
            break
        mass = 0.0
        for i in range(found):
            mass += pool.row_probabilities[i]
        threshold = _uniform(random) * mass
        sampled = found - 1
        for i in range(found):
            threshold -= pool.row_probabilities[i]
            if threshold < 0.0:
                sampled = i
                break
        log_probability += np.log(max(pool.row_probabilities[sampled], 1e-12))
        total += pool.row_probabilities[sampled]
        before, previous, last = previous, last, pool.row_tokens[sampled]
        length += 1
    return total if summed else np.exp(log_probability / max(length, 1))


@kernel
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
    _restart(pool, text[2])
    size = 1
    for _ in range(iterations):
        node = 0
        while pool.first_child[node] and pool.children[node] and pool.nodes.depths[node] < depth:
            node = _select(pool, node, c1, c2)
        if not pool.first_child[node] and pool.nodes.depths[node] < depth and size < len(pool.nodes.tokens):
            size = _expand(trigrams, pool, size, node, text, len(pool.row_tokens))
            if pool.children[node]:
                node = pool.first_child[node]
        reward = _rollout(trigrams, pool, node, text, depth, random, summed)
        while node >= 0:
            pool.visits[node] += 1
            pool.reward[node] += reward
            node = pool.nodes.parents[node]
    for _ in range(candidates):
        node = _best(pool, size, depth, ranking)
        if node < 0:
            break
        while node >= 0:
            pool.nodes.chosen[node] = True
            node = pool.nodes.parents[node]
    return size


@kernel
def _best(pool: Pool, size: int, depth: int, ranking: int) -> int:
    """The best node that is not chosen yet; -1 if there is none.

    By visits, any node will do; otherwise, it is a leaf or at `depth`. Except by path, only visited nodes count.
    """
    best, best_value = -1, 0.0
    for node in range(1, size):
        if pool.nodes.chosen[node] or (ranking != VISITS and pool.nodes.depths[node] != depth and pool.children[node]):
            continue
        value = np.float64(pool.nodes.path[node])
        if ranking == SCORE:
            value = pool.reward[node]
        elif ranking == VISITS:
            value = np.float64(pool.visits[node])
        if value > best_value:
            best, best_value = node, value
    return best


@kernel
def best_first(
    trigrams: Trigrams, pool: Pool, text: NDArray[np.int32], depth: int, budget: int, floor: float, width: int, dice: Dice
) -> int:
    """Marks the `budget` likeliest nodes of up to `depth` tokens and at least `floor` path probability; returns the size.

    A node has at most `width` children: 1 is greedy search, which gives a chain.
    """
    _restart(pool, text[2])
    size = _expand(trigrams, pool, 1, 0, text, width)
    weigh_children(dice, pool.nodes, 1, size)
    for _ in range(budget):
        best = likeliest_unchosen(pool.nodes, size)
        if best < 0 or pool.nodes.path[best] < floor:
            break
        pool.nodes.chosen[best] = True
        if pool.nodes.depths[best] < depth and size < len(pool.nodes.tokens):
            first, size = size, _expand(trigrams, pool, size, best, text, width)
            weigh_children(dice, pool.nodes, first, size)
    return size
