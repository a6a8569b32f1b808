"""Two searches for the continuations worth verifying: ADED's Monte Carlo tree search and best-first by probability.

Both grow a `Pool` of nodes from the session's tri-gram distribution, mark the nodes of a draft, and lay them out as a
DraftTree. Promises the same tree for the same tables and seed, and no allocation that grows with the text.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from drafters.adaptive import Rows, successors
from drafters.draft import EMPTY, DraftTree, Source
from drafters.ngram import BaseArrays


class Pool(NamedTuple):
    """Search nodes, node 0 being the last committed token; a node's children stand together, likeliest first."""

    tokens: NDArray[np.int32]  # [P]
    parents: NDArray[np.int32]  # [P]
    depths: NDArray[np.int32]  # [P]
    first_child: NDArray[np.int32]  # [P]; 0 = not expanded
    children: NDArray[np.int32]  # [P]; how many
    path: NDArray[np.float32]  # [P]; probability of the path from node 0
    prior: NDArray[np.float32]  # [P]; probability after its parent: P(s, a) of Eq. 2
    visits: NDArray[np.int32]  # [P]; N(s, a)
    reward: NDArray[np.float64]  # [P]; sum over visits, so Q(s, a) = reward / visits
    chosen: NDArray[np.bool_]  # [P]; part of the draft
    row_tokens: NDArray[np.int32]  # [S]; workspace for one successor list
    row_probabilities: NDArray[np.float32]  # [S]


def new_pool(nodes: int, row: int) -> Pool:
    """Room for `nodes` search nodes, expanded at most `row` ways."""
    return Pool(
        np.zeros(nodes, np.int32),
        np.zeros(nodes, np.int32),
        np.zeros(nodes, np.int32),
        np.zeros(nodes, np.int32),
        np.zeros(nodes, np.int32),
        np.zeros(nodes, np.float32),
        np.zeros(nodes, np.float32),
        np.zeros(nodes, np.int32),
        np.zeros(nodes, np.float64),
        np.zeros(nodes, np.bool_),
        np.zeros(row, np.int32),
        np.zeros(row, np.float32),
    )


@njit(cache=True, nogil=True)
def _reset(pool: Pool, last: int) -> None:
    pool.tokens[0] = last
    pool.parents[0] = -1
    pool.depths[0] = 0
    pool.first_child[0] = 0
    pool.children[0] = 0
    pool.path[0] = 1.0
    pool.prior[0] = 1.0
    pool.visits[0] = 0
    pool.reward[0] = 0.0
    pool.chosen[0] = True


@njit(cache=True, nogil=True)
def _expand(base: BaseArrays, rows: Rows, pool: Pool, size: int, node: int, previous: int) -> int:
    """Appends the children of `node`; returns the pool's new size. `previous` is the token before node 0's."""
    before = previous if node == 0 else pool.tokens[pool.parents[node]]
    found = successors(base, rows, before, pool.tokens[node], pool.row_tokens, pool.row_probabilities)
    found = min(found, len(pool.tokens) - size)
    pool.first_child[node] = size
    pool.children[node] = found
    for i in range(found):
        child = size + i
        pool.tokens[child] = pool.row_tokens[i]
        pool.parents[child] = node
        pool.depths[child] = pool.depths[node] + 1
        pool.first_child[child] = 0
        pool.children[child] = 0
        pool.path[child] = pool.path[node] * pool.row_probabilities[i]
        pool.prior[child] = pool.row_probabilities[i]
        pool.visits[child] = 0
        pool.reward[child] = 0.0
        pool.chosen[child] = False
    return size + found


@njit(cache=True, nogil=True)
def _uniform(state: NDArray[np.uint64]) -> float:
    """Xorshift64*: the next number in [0, 1)."""
    x = state[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    state[0] = x
    return float((x * np.uint64(0x2545F4914F6CDD1D)) >> np.uint64(11)) / 9007199254740992.0


@njit(cache=True, nogil=True)
def _select(pool: Pool, node: int, c1: float, c2: float) -> int:
    """The child with the largest PUCT score (Eq. 2, with E from Eq. 3)."""
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


@njit(cache=True, nogil=True)
def _rollout(
    base: BaseArrays, rows: Rows, pool: Pool, node: int, previous: int, depth: int, random: NDArray[np.uint64]
) -> float:
    """Samples on from `node` down to `depth`; the whole path's log-probability per token, as a number in (0, 1]."""
    log_probability = np.log(max(pool.path[node], 1e-12))
    length = pool.depths[node]
    last = pool.tokens[node]
    before = previous if node == 0 else pool.tokens[pool.parents[node]]
    while length < depth:
        found = successors(base, rows, before, last, pool.row_tokens, pool.row_probabilities)
        if found == 0:
            break
        mass = 0.0
        for i in range(found):
            mass += pool.row_probabilities[i]
        threshold = _uniform(random) * mass
        picked = found - 1
        for i in range(found):
            threshold -= pool.row_probabilities[i]
            if threshold < 0.0:
                picked = i
                break
        log_probability += np.log(max(pool.row_probabilities[picked], 1e-12))
        before, last = last, pool.row_tokens[picked]
        length += 1
    return np.exp(log_probability / max(length, 1))


@njit(cache=True, nogil=True)
def monte_carlo(
    base: BaseArrays,
    rows: Rows,
    pool: Pool,
    previous: int,
    last: int,
    depth: int,
    iterations: int,
    candidates: int,
    c1: float,
    c2: float,
    random: NDArray[np.uint64],
) -> int:
    """Algorithm 1: marks the `candidates` likeliest visited continuations of up to `depth` tokens; returns the size.

    Where it departs from the authors' code: the reward is the path's own log-probability, normalised by its length (theirs
    looks up the wrong word, so every path earns about 1), and ties go to the likelier token, never to hash order.
    """
    _reset(pool, last)
    size = 1
    for _ in range(iterations):
        node = 0
        while pool.first_child[node] and pool.children[node] and pool.depths[node] < depth:
            node = _select(pool, node, c1, c2)
        if not pool.first_child[node] and pool.depths[node] < depth and size < len(pool.tokens):
            size = _expand(base, rows, pool, size, node, previous)
            if pool.children[node]:
                node = pool.first_child[node]
        earned = _rollout(base, rows, pool, node, previous, depth, random)
        while node >= 0:
            pool.visits[node] += 1
            pool.reward[node] += earned
            node = pool.parents[node]
    for _ in range(candidates):
        best = -1
        for node in range(1, size):
            ends = pool.depths[node] == depth or not pool.children[node]
            if ends and not pool.chosen[node] and (best < 0 or pool.path[node] > pool.path[best]):
                best = node
        if best < 0:
            break
        while best >= 0:
            pool.chosen[best] = True
            best = pool.parents[best]
    return size


@njit(cache=True, nogil=True)
def best_first(
    base: BaseArrays, rows: Rows, pool: Pool, previous: int, last: int, depth: int, budget: int, floor: float
) -> int:
    """Marks the `budget` likeliest nodes of up to `depth` tokens and at least `floor` path probability."""
    _reset(pool, last)
    size = _expand(base, rows, pool, 1, 0, previous)
    for _ in range(budget):
        best = -1
        for node in range(1, size):
            if not pool.chosen[node] and (best < 0 or pool.path[node] > pool.path[best]):
                best = node
        if best < 0 or pool.path[best] < floor:
            break
        pool.chosen[best] = True
        if pool.depths[best] < depth and size < len(pool.tokens):
            size = _expand(base, rows, pool, size, best, previous)
    return size


@njit(cache=True, nogil=True)
def _trim(pool: Pool, size: int, budget: int) -> int:
    """Unmarks the unlikeliest nodes until `budget` are left; a parent is never unlikelier than its child."""
    count = 0
    for node in range(1, size):
        count += pool.chosen[node]
    while count > budget:
        worst = -1
        for node in range(1, size):
            # "<=": of equals the later one goes, so that a child goes before its parent.
            if pool.chosen[node] and (worst < 0 or pool.path[node] <= pool.path[worst]):
                worst = node
        pool.chosen[worst] = False
        count -= 1
    return count


@njit(cache=True, nogil=True)
def _lay_out(
    pool: Pool,
    count: int,
    tokens: NDArray[np.int32],
    parents: NDArray[np.int32],
    depths: NDArray[np.int32],
    path: NDArray[np.float32],
) -> None:
    """Writes the marked nodes depth-first, likeliest child first."""
    stack = np.empty((len(pool.tokens), 2), np.int32)  # a node, and its parent's row in the output
    top = _push_children(pool, stack, 0, 0, -1)
    for row in range(count):
        top -= 1
        node = stack[top, 0]
        tokens[row], parents[row] = pool.tokens[node], stack[top, 1]
        depths[row], path[row] = pool.depths[node], pool.path[node]
        top = _push_children(pool, stack, top, node, row)


@njit(cache=True, nogil=True)
def _push_children(pool: Pool, stack: NDArray[np.int32], top: int, node: int, row: int) -> int:
    """Puts the marked children of `node` on the stack, the likeliest on top; returns the stack's new height."""
    first = pool.first_child[node]
    for i in range(pool.children[node]):
        child = first + pool.children[node] - 1 - i
        if pool.chosen[child]:
            stack[top, 0], stack[top, 1] = child, row
            top += 1
    return top


def draft_tree(pool: Pool, size: int, budget: int, source: Source) -> DraftTree:
    """The pool's marked nodes as a DraftTree of at most `budget` nodes."""
    count = _trim(pool, size, budget)
    if count == 0:
        return EMPTY
    tokens, parents, depths = (np.empty(count, np.int32) for _ in range(3))
    path = np.empty(count, np.float32)
    _lay_out(pool, count, tokens, parents, depths, path)
    return DraftTree(tokens, parents, depths, path, np.full(count, source, np.uint8))
