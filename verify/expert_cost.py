"""The cost of experts in a step: nodes cost by the experts that they touch, not by their number.

A step reads each expert once that any of its rows uses. Of the experts that the rows before it have not touched, a row leaves a
share: 1 - used / count if it chooses like a random token, more if it chooses like those rows. How much more depends on what the
row is, and on the model and the text, so it is learned from what forwards have touched.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.drafters.interface import DraftTree, Source

COPIES = (Source.RETRIEVAL, Source.LOOKUP, Source.PREDICTION)
# A forward corrects what it disagrees with by this share.
RATE = 1 / 8
# A row may touch this many times as many new experts as a random token would.
MOST_OF_RANDOM = 1.5
# Forwards that leave fewer than this share of the experts say little about each row.
LEAST_LEFT = 0.03


class Kind(IntEnum):
    """The kind of a step's row, except for the first root."""

    NEXT = 0  # its parent's likeliest child
    SIBLING = 1
    COPY = 2  # of a text
    ROOT = 3  # of a further stream


Kinds = NDArray[np.int64]
NO_ROWS: Kinds = np.empty(0, np.int64)


class Touched(NamedTuple):
    """The experts that a forward of steps has touched."""

    kinds: Kinds  # of its rows, without the first root
    experts: float  # mean over the mixtures of the model


def kinds_of(tree: DraftTree) -> Kinds:
    """The kinds of a draft's nodes, int64 [N]."""
    follows = tree.parents == np.arange(-1, len(tree) - 1)
    return np.where(np.isin(tree.source, COPIES), Kind.COPY, np.where(follows, Kind.NEXT, Kind.SIBLING)).astype(np.int64)


def kinds_of_step(trees: Sequence[DraftTree]) -> Kinds:
    """The kinds of all rows of the streams' steps but the first root."""
    root = np.array([Kind.ROOT], np.int64)
    return np.concatenate([part for tree in trees for part in (root, kinds_of(tree))])[1:] if trees else NO_ROWS


class ExpertCost:
    """Seconds of the experts that a step touches beyond those of one row."""

    def __init__(self, count: int, used: int, seconds: float, left: Sequence[float] | None = None) -> None:
        """`seconds` is the time of one more expert in every mixture, each of which has `count` experts, `used` by a row.

        `left` are the shares of the untouched experts that a row of each kind leaves; None = as random tokens.
        """
        assert 0 < used < count
        self.count, self.used, self.seconds = count, used, seconds
        self._least = math.log(max(1e-3, 1 - MOST_OF_RANDOM * used / count))
        random = math.log(1 - used / count)
        self._logs = np.full(len(Kind), random) if left is None else np.log(np.array(left))

    def touched(self, kinds: Kinds, rows: int) -> NDArray[np.float64]:
        """The experts of 1, 2, ... `rows` rows, of these kinds but the first; rows beyond are as `Kind.NEXT`."""
        kinds = np.concatenate([kinds, np.full(max(0, rows - 1 - len(kinds)), Kind.NEXT)])[: rows - 1]
        left = np.exp(np.concatenate([[0.0], np.cumsum(self._logs[kinds])]))
        found: NDArray[np.float64] = self.count - (self.count - self.used) * left
        return found

    def of(self, experts: float | NDArray[np.float64]) -> Any:
        """Seconds of a step that touches this many experts, beyond those of one row."""
        return self.seconds * np.maximum(experts - self.used, 0.0)

    def observe(self, touched: Touched) -> None:
        """Learns what rows leave from what a forward has touched: normalised least mean squares on the logarithms."""
        left = (self.count - touched.experts) / (self.count - self.used)
        counts = np.bincount(touched.kinds, minlength=len(Kind)).astype(np.float64)
        if left < LEAST_LEFT or not counts.any():
            return
        error = math.log(min(left, 1.0)) - float(counts @ self._logs)
        self._logs = np.clip(self._logs + RATE * error * counts / (counts @ counts), self._least, 0.0)

    def state(self) -> dict[str, Any]:
        """The arguments that make it again, for JSON."""
        return {"count": self.count, "used": self.used, "seconds": self.seconds, "left": np.exp(self._logs).tolist()}


def parse_expert_cost(saved: dict[str, Any]) -> ExpertCost:
    """Parses the result of `state`. Raises ValueError, KeyError or TypeError."""
    count, used, seconds = int(saved["count"]), int(saved["used"]), float(saved["seconds"])
    left = [float(each) for each in saved["left"]]
    if not (0 < used < count and 0 <= seconds < math.inf and len(left) == len(Kind) and all(0 < each <= 1 for each in left)):
        raise ValueError("experts must have shares above 0 and at most 1, and seconds of at least 0")
    return ExpertCost(count, used, seconds, left)
