"""The cost of a step on this machine: seconds by draft nodes, by context length and by number of streams.

A tree of 64 nodes is nearly free on a large GPU and costs ten steps on a laptop; the budget follows this curve. It is measured
once (`outrider.verify.measurement`), and what steps take corrects it from then on. Knows nothing about models and files.
"""

from __future__ import annotations

import itertools
import json
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.drafters.interface import MAX_NODES

KEPT_SHARE = 0.25
# Other work on the machine only adds time, so a step that took less than expected says more than one that took longer.
FALL, RISE = 1 / 4, 1 / 16  # of a step's deviation that are corrected at once
MOST_DEVIATION = 2.0  # the factor that one step can show
COMMON_SHARE = 2 / 3  # of a correction that the whole curve shares; the rest is for the points around the step


class CostCurve:
    """Seconds of a step by draft nodes, at several context lengths (tokens). More nodes or a longer context never cost less."""

    def __init__(
        self,
        nodes: Sequence[int],
        contexts: Sequence[int],
        seconds: Sequence[Sequence[float]] | NDArray[np.float64],
        row_seconds: float = 0.0,
        stream_seconds: float = 0.0,
    ) -> None:
        self.nodes = tuple(nodes)  # ascending, from 0 to the most that a step may have
        self.contexts = tuple(contexts)  # ascending
        # float64 [contexts, nodes]. Noise adds time, so of two measurements out of order, the larger one is wrong.
        self.seconds = lowered(np.array(seconds, np.float64))
        self.row_seconds = row_seconds  # of each row beyond those of one stream's largest step
        self.stream_seconds = stream_seconds  # of each further stream, beside its rows
        self.is_corrected = False  # since it was loaded or saved

    def at(self, context: int) -> NDArray[np.float64]:
        """Seconds of a step over 0, 1, ... nodes[-1] draft nodes after `context` tokens, float64 [nodes[-1] + 1]."""
        row = neighbours(self.contexts, context) @ self.seconds
        return np.interp(np.arange(self.nodes[-1] + 1), self.nodes, row)

    def of_rows(self, context: int, streams: int, rows: int) -> NDArray[np.float64]:
        """Seconds of a step of `streams` streams over 1, 2, ... `rows` rows in all, each after `context` tokens."""
        seconds = self.at(context)
        if rows > len(seconds):
            more = np.arange(1, rows - len(seconds) + 1)
            seconds = np.concatenate([seconds, seconds[-1] + more * self.row_seconds])
        return seconds[:rows] + self.stream_seconds * (streams - 1)

    def paying_streams(self, most: int) -> int:
        """How many streams, at most `most`, a round should have: each adds KEPT_SHARE of what it would have alone, or more.

        Two are always worth a try: with one, nothing would ever correct the cost of the second.
        """
        context = self.contexts[0]
        rates = [streams / float(self.of_rows(context, streams, streams)[-1]) for streams in range(1, most + 1)]
        for streams, (fewer, rate) in enumerate(itertools.pairwise(rates), start=1):
            if rate - fewer < KEPT_SHARE * fewer / streams:
                return max(2, streams)
        return most

    def observe(self, context: int, streams: int, rows: int, seconds: float) -> None:
        """Corrects the curve by the time of one step over `rows` rows in all, each after `context` tokens.

        The step of a stream alone corrects the points. That of several streams corrects only what further streams cost.
        """
        alone = float(self.of_rows(context, 1, rows)[-1])
        if streams == 1:
            self._correct(context, rows - 1, seconds / alone)
        else:
            excess = min(max(0.0, (seconds - alone) / (streams - 1)), alone) - self.stream_seconds
            self.stream_seconds += (FALL if excess < 0 else RISE) * excess
        self.is_corrected = True

    def _correct(self, context: int, nodes: int, ratio: float) -> None:
        """Corrects all points by a step that took `ratio` times as long as expected.

        What disturbed the measurement of one point probably disturbed the others, and a point that is far too high would never
        be chosen, so never be corrected. Therefore all points follow.
        """
        ratio = min(max(ratio, 1 / MOST_DEVIATION), MOST_DEVIATION)
        change = ratio ** (FALL if ratio < 1 else RISE)
        around = np.outer(neighbours(self.contexts, context), neighbours(self.nodes, nodes))
        seconds = self.seconds * change ** (COMMON_SHARE + (1 - COMMON_SHARE) * around)
        # What is new decides: after a fall, what should cost less falls with it; after a rise, what should cost more rises.
        self.seconds = lowered(seconds) if ratio < 1 else raised(seconds)
        self.row_seconds *= change**COMMON_SHARE

    def state(self) -> dict[str, Any]:
        """What `parse` reads, for JSON."""
        return {
            "nodes": self.nodes,
            "contexts": self.contexts,
            "seconds": self.seconds.tolist(),
            "row_seconds": self.row_seconds,
            "stream_seconds": self.stream_seconds,
        }


def neighbours(points: Sequence[int], place: int) -> NDArray[np.float64]:
    """The weights of the points (ascending) between which `place` lies, in linear interpolation, float64 [points]."""
    weights = np.zeros(len(points))
    above = bisect_left(points, place)
    if above in (0, len(points)):
        weights[min(above, len(points) - 1)] = 1.0
    else:
        share = (place - points[above - 1]) / (points[above] - points[above - 1])
        weights[above - 1 : above + 1] = 1 - share, share
    return weights


def lowered(seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """The largest table [contexts, nodes] below this one that ascends along both axes."""
    return np.minimum.accumulate(np.minimum.accumulate(seconds[::-1, ::-1], 0), 1)[::-1, ::-1]


def raised(seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """The smallest table [contexts, nodes] above this one that ascends along both axes."""
    return np.maximum.accumulate(np.maximum.accumulate(seconds, 0), 1)


def parse(text: str, most: int = MAX_NODES) -> CostCurve:
    """The curve in a saved file, of 0 to `most` nodes. Raises ValueError if it is not a complete one."""
    try:
        saved = json.loads(text)
        nodes, contexts = (np.array(saved[name], np.int64) for name in ("nodes", "contexts"))
        seconds = np.array(saved["seconds"], np.float64)
        further = np.array([saved[name] for name in ("row_seconds", "stream_seconds")], np.float64)
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
    return CostCurve(nodes.tolist(), contexts.tolist(), seconds, *further.tolist())
