"""The cost of a step on this machine: seconds by draft nodes, by context length and by number of streams.

A tree of 64 nodes is nearly free on a large GPU and costs ten steps on a laptop; the budget follows this curve. It is measured
once (`outrider.verify.measurement`), and what steps take corrects it from then on. Knows nothing about models and files.

In a mixture, nodes cost by the experts that they touch. A step reads each expert once that any of its rows uses. Of the experts
that the rows before it have not touched, a row leaves a share: 1 - used / count if it chooses like a random token, more if it
chooses like those rows. How much more depends on what the row is, and on the model and the text, so it is learned from what
forwards have touched.
"""

from __future__ import annotations

import itertools
import json
import math
from bisect import bisect_left
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.drafters.interface import MAX_NODES, DraftTree, Source
from outrider.drafters.policy import FALL, RISE, correction, deviation, ema

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


KEPT_SHARE = 0.25
# The points around a step follow this share of what it deviates beyond the usual deviation, and more of it in the first steps
# that took less: a point whose measurement was disturbed is chosen rarely.
OWN = 1 / 16
# Steps cost the same after any of this many tokens, so that consecutive steps share what the curve says.
CONTEXT_TOKENS = 64


class Costs(NamedTuple):
    """The cost of a step after some number of tokens."""

    seconds: NDArray[np.float64]  # by draft nodes, float64 [nodes]
    least_probability: float  # below which no node pays: what the cheapest further node costs, over a step without any


class CostCurve:
    """Seconds of a step by draft nodes, at several context lengths (tokens). More nodes or a longer context never cost less.

    Of a mixture whose experts are counted, the points are without experts beyond those of one row, which `experts` adds.
    """

    def __init__(
        self,
        nodes: Sequence[int],
        contexts: Sequence[int],
        seconds: Sequence[Sequence[float]] | NDArray[np.float64],
        row_seconds: float = 0.0,
        stream_seconds: float = 0.0,
        experts: ExpertCost | None = None,
    ) -> None:
        self.nodes = tuple(nodes)  # ascending, from 0 to the most nodes of a step
        self.contexts = tuple(contexts)  # ascending
        # float64 [contexts, nodes]. Noise adds time, so of two measurements out of order, the larger one is wrong.
        reversed_seconds = np.array(seconds, np.float64)[::-1, ::-1]
        self.seconds: NDArray[np.float64] = np.minimum.accumulate(np.minimum.accumulate(reversed_seconds, 0), 1)[::-1, ::-1]
        self.row_seconds = row_seconds  # seconds of a row beyond those of one stream's largest step
        self.stream_seconds = stream_seconds  # seconds of a further stream, without its rows
        self.experts = experts
        self.is_estimated = False  # whether it comes from a few steps that were timed while the server started
        self.is_corrected = False  # whether it has changed since it was loaded or saved
        self._costs: dict[int, Costs] = {}  # what steps cost by context, in units of CONTEXT_TOKENS
        self._visits = [0] * len(self.nodes)  # steps that corrected the points of a size
        self._usual: float | None = None  # logarithm of recent steps' deviation (EMA)

    def at(self, context: int) -> NDArray[np.float64]:
        """Seconds of a step over 0, 1, ... nodes[-1] draft nodes after `context` tokens, float64 [nodes[-1] + 1]."""
        return self.of_rows(context, 1, self.nodes[-1] + 1)

    def of_rows(self, context: int, streams: int, rows: int, kinds: Kinds = NO_ROWS) -> NDArray[np.float64]:
        """Seconds of a step of `streams` streams over 1, 2, ... `rows` rows in all, each after `context` tokens.

        `kinds` are those of the rows after the first, in a mixture.
        """
        seconds = self._around(context).seconds
        if rows > len(seconds):
            more = np.arange(1, rows - len(seconds) + 1)
            seconds = np.concatenate([seconds, seconds[-1] + more * self.row_seconds])
        seconds = seconds[:rows] + self.stream_seconds * (streams - 1)
        return seconds if self.experts is None else seconds + self.experts.of(self.experts.touched(kinds, rows))

    def of_step(self, context: int, streams: int, rows: int, kinds: Kinds = NO_ROWS) -> float:
        """Seconds of a step of `streams` streams over `rows` rows in all: the last of `of_rows`."""
        seconds = self._of_points(context, streams, rows)
        return seconds if self.experts is None else seconds + float(self.experts.of(self.experts.touched(kinds, rows)[-1]))

    def _of_points(self, context: int, streams: int, rows: int) -> float:
        """The same without experts beyond those of one row."""
        seconds = sum(weight * self.seconds.item(point) for point, weight in self._points(context, rows - 1))
        beyond = max(0, rows - 1 - self.nodes[-1])
        return seconds + beyond * self.row_seconds + self.stream_seconds * (streams - 1)

    def least_probability(self, context: int) -> float:
        """The path probability below which no node pays after `context` tokens."""
        return self._around(context).least_probability

    def _around(self, context: int) -> Costs:
        """The cost of a step after about `context` tokens."""
        place = context // CONTEXT_TOKENS
        if place not in self._costs:
            weights = neighbours(self.contexts, place * CONTEXT_TOKENS)
            row = np.sum([weight * self.seconds[i] for i, weight in weights], 0)
            least = (np.diff(row) / np.diff(self.nodes)).min() / row[0]
            self._costs[place] = Costs(np.interp(np.arange(self.nodes[-1] + 1), self.nodes, row), float(least))
        return self._costs[place]

    def _points(self, context: int, nodes: int) -> list[tuple[tuple[int, int], float]]:
        """The indices of the points around a step, and their weights in bilinear interpolation."""
        around = neighbours(self.nodes, nodes)
        return [((i, j), high * wide) for i, high in neighbours(self.contexts, context) for j, wide in around]

    def streams_worth_running(self, most: int) -> int:
        """How many streams, at most `most`, a round should have: each adds KEPT_SHARE of what it would have alone, or more.

        Two are always worth a try: with one, nothing would ever correct the cost of the second.
        """
        context = self.contexts[0]
        roots = np.full(most - 1, Kind.ROOT)
        rates = [streams / self.of_step(context, streams, streams, roots) for streams in range(1, most + 1)]
        for streams, (fewer, rate) in enumerate(itertools.pairwise(rates), start=1):
            if rate - fewer < KEPT_SHARE * fewer / streams:
                return max(2, streams)
        return most

    def observe(self, context: int, streams: int, rows: int, seconds: float, touched: Touched | None = None) -> None:
        """Corrects the curve by the time of one step over `rows` rows in all, each after `context` tokens.

        The step of a stream alone corrects the points. That of several streams corrects only what further streams cost.
        """
        of_experts = 0.0
        if self.experts is not None and touched is not None:
            of_experts = float(self.experts.of(touched.experts))
            self.experts.observe(touched)
        alone = self._of_points(context, 1, rows) + of_experts
        if streams == 1:
            self._correct(context, rows - 1, seconds / alone, of_experts / alone)
        else:
            excess = min(max(0.0, (seconds - alone) / (streams - 1)), alone) - self.stream_seconds
            self.stream_seconds += (FALL if excess < 0 else RISE) * excess
        self.is_corrected = True

    def lower(self, other: CostCurve) -> None:
        """Takes over what costs less in another estimate: other work only adds time."""
        share = np.minimum(1.0, other.seconds[0] / self.seconds[0])
        self.seconds = np.minimum.accumulate((self.seconds * share)[:, ::-1], 1)[:, ::-1]
        self.row_seconds = min(self.row_seconds, other.row_seconds)
        if self.experts is not None and other.experts is not None:
            self.experts.seconds = min(self.experts.seconds, other.experts.seconds)
        self._costs.clear()
        self.is_estimated, self.is_corrected = False, True

    def _correct(self, context: int, nodes: int, ratio: float, expert_share: float) -> None:
        """Corrects all points by a step that took `ratio` times as long as expected, and those around it by what only it shows.

        `expert_share` is that of the experts beyond those of one row in what was expected.

        What disturbed the measurement of one point probably disturbed the others, and a point that is far too high would never
        be chosen, so never be corrected. Therefore all points follow. Where all steps take longer, for example because of the
        rest of the server, the points that are visited most must not approach the others: only their ratios decide.
        """
        found = deviation(ratio)
        self._usual = ema(self._usual, found)
        own, common = found - self._usual, correction(found)
        self.seconds *= common
        self.row_seconds *= common
        if self.experts is not None:
            self.experts.seconds *= common * math.exp(OWN * own * expert_share)
        self._costs.clear()
        points = self._points(context, nodes)
        shares = [max(OWN, 1 / (2 + self._visits[j])) if own < 0 else OWN for (_, j), _ in points]
        values = [
            self.seconds.item(point) * math.exp(share * own * wide) for (point, wide), share in zip(points, shares, strict=True)
        ]
        for ((i, j), _), value in zip(points, values, strict=True):
            self._visits[j] += 1
            # The new measurement decides: after a fall, points that should cost less fall with it; after a rise, points that
            # should cost more rise.
            changed, limit = (self.seconds[: i + 1, : j + 1], np.minimum) if own < 0 else (self.seconds[i:, j:], np.maximum)
            limit(changed, value, out=changed)

    def state(self) -> dict[str, Any]:
        """The state that `parse` reads, for JSON."""
        return {
            "nodes": self.nodes,
            "contexts": self.contexts,
            "seconds": self.seconds.tolist(),
            "row_seconds": self.row_seconds,
            "stream_seconds": self.stream_seconds,
            "experts": None if self.experts is None else self.experts.state(),
        }


def neighbours(points: Sequence[int], place: int) -> list[tuple[int, float]]:
    """The indices of the points (ascending) between which `place` lies, and their weights in linear interpolation."""
    above = bisect_left(points, place)
    if above in (0, len(points)):
        return [(min(above, len(points) - 1), 1.0)]
    share = (place - points[above - 1]) / (points[above] - points[above - 1])
    return [(above - 1, 1 - share), (above, share)]


def parse(text: str, most: int = MAX_NODES) -> CostCurve:
    """The curve in a saved file, of 0 to `most` nodes. Raises ValueError if it is not a complete one."""
    try:
        saved = json.loads(text)
        nodes, contexts = (np.array(saved[name], np.int64) for name in ("nodes", "contexts"))
        seconds = np.array(saved["seconds"], np.float64)
        further = np.array([saved[name] for name in ("row_seconds", "stream_seconds")], np.float64)
        experts = None if saved["experts"] is None else parse_expert_cost(saved["experts"])
    except (KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None
    for name, values in (("nodes", nodes), ("contexts", contexts)):
        if values.ndim != 1 or not len(values) or np.any(np.diff(values) <= 0):
            raise ValueError(f"{name} must be ascending numbers")
    if nodes[0] != 0 or nodes[-1] != most or contexts[0] < 1:
        raise ValueError(f"nodes must be 0 to {most}, and contexts positive")
    if not np.all((further >= 0) & np.isfinite(further)):
        raise ValueError("row_seconds and stream_seconds must be numbers of at least 0")
    if seconds.shape != (len(contexts), len(nodes)) or not np.all((seconds > 0) & np.isfinite(seconds)):
        raise ValueError("seconds must be positive numbers by contexts and nodes")
    of_row, of_stream = further.tolist()
    return CostCurve(nodes.tolist(), contexts.tolist(), seconds, of_row, of_stream, experts)
