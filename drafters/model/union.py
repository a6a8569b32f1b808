"""A draft model beside the tables: one tree of both, the model asked where that has paid.

A table's draft costs next to nothing, a model's forwards do not. What the model adds, in emitted tokens, is measured by how
much the tables promise; it is asked where that is worth its time, and now and then elsewhere: things may have changed.
"""

from __future__ import annotations

import time

import numpy as np

from drafters.draft_tree import depth_first
from drafters.interface import EMPTY, NOTHING, Drafter, DraftTree, Ints, Sampling, Verdict
from drafters.policy import Worth, ema

PRIOR = 0.3  # tokens that the model is thought to add before it has been asked
LEVELS = (0.25, 0.5, 1.0, 2.0, 4.0)  # of tokens that the tables promise; between them, gains are kept apart


class UnionDrafter:
    """Tables and a draft model for one session. Implements `Drafter`."""

    def __init__(self, tables: Drafter, model: Drafter) -> None:
        self._tables = tables
        self._model = model
        self.feedback = max(tables.feedback, model.feedback)
        self._gain = np.full(len(LEVELS) + 1, PRIOR)  # tokens that the model added, by level; decaying means
        self._worth = Worth()  # of asking the model
        self._level = 0
        self._asked = False
        self._from_tables = EMPTY
        self._started = 0.0

    def begin(self, prompt: Ints, prediction: Ints = NOTHING, sampling: Sampling | None = None) -> None:
        self._tables.begin(prompt, prediction, sampling)
        self._model.begin(prompt, prediction, sampling)

    def propose(self, budget: int) -> DraftTree:
        self._started = time.perf_counter()
        tree = self._from_tables = self._tables.propose(budget)
        self._level = int(np.searchsorted(LEVELS, float(tree.probability.sum())))
        self._asked = self._worth.tried(self._gain[self._level])
        if not self._asked:
            return tree
        started = time.perf_counter()
        draft = self._model.propose(budget)
        self._worth.took(time.perf_counter() - started)
        return merged(tree, draft, budget) if draft.q is None else tree  # draws and guesses cannot be siblings

    def observe(self, verdict: Verdict) -> None:
        if self._asked:
            gain = len(verdict.rows) - followed(self._from_tables, verdict.tokens[:-1])
            self._gain[self._level] = ema(self._gain[self._level], max(0, gain))
        self._tables.observe(verdict)
        self._model.observe(verdict)
        self._worth.emitted(len(verdict.tokens), time.perf_counter() - self._started)

    def end(self) -> None:
        self._tables.end()
        self._model.end()


def merged(left: DraftTree, right: DraftTree, budget: int) -> DraftTree:
    """The `budget` likeliest nodes of two trees; a node of both has the larger probability."""
    places: dict[tuple[int, int], int] = {}  # by parent and token
    found: list[tuple[float, int, int]] = []  # probability, depth, source
    for tree in (left, right):
        place_of = {-1: -1}
        rows = zip(tree.tokens, tree.parents, tree.depths, tree.probability, tree.source, strict=True)
        for row, (token, parent, depth, probability, source) in enumerate(rows):
            key = place_of[int(parent)], int(token)
            place = place_of[row] = places.setdefault(key, len(found))
            if place == len(found):
                found.append((float(probability), int(depth), int(source)))
            elif probability > found[place][0]:
                found[place] = float(probability), int(depth), int(source)
    keys = list(places)
    likeliest = sorted(range(len(found)), key=lambda place: (-found[place][0], found[place][1]))  # parents before children
    kept = likeliest[:budget]
    at = {-1: -1} | {place: number for number, place in enumerate(kept)}
    order = [kept[number] for number in depth_first([at[keys[place][0]] for place in kept])]
    row_of = {-1: -1} | {place: row for row, place in enumerate(order)}
    return DraftTree(
        np.array([keys[place][1] for place in order], np.int32),
        np.array([row_of[keys[place][0]] for place in order], np.int32),
        np.array([found[place][1] for place in order], np.int32),
        np.array([found[place][0] for place in order], np.float32),
        np.array([found[place][2] for place in order], np.uint8),
    )


def followed(tree: DraftTree, tokens: Ints) -> int:
    """How many of `tokens` the tree has, from its root down."""
    children = {(int(p), int(t)): row for row, (p, t) in enumerate(zip(tree.parents, tree.tokens, strict=True))}
    node = -1
    for count, token in enumerate(tokens.tolist()):
        below = children.get((node, token))
        if below is None:
            return count
        node = below
    return len(tokens)
