"""A forward over several streams: the rows of each follow its own cache, and attend to nothing of another stream."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.verify.model.batch import ForwardBatch

if TYPE_CHECKING:
    from outrider.verify.model.adapter import Adapter
    from outrider.verify.model.pictures import Picture


class Segment(NamedTuple):
    """The rows of one stream in a forward."""

    cache: Any  # a KVCache of the runner
    batch: ForwardBatch
    logits: bool = True  # whether all computed rows have logits, not only the last one
    adapter: Adapter | None = None
    shift: int = 0  # positions that pictures before the rows do not take, though they have tokens
    picture: Picture | None = None  # whose rows these are

    @property
    def rows(self) -> int:
        """The number of rows that are computed."""
        return len(self.batch) - self.batch.known

    @property
    def kept(self) -> int:
        """The number of rows whose logits are returned."""
        return self.rows if self.logits else 1


def grouped(segments: Sequence[Segment], most_rows: int, most_streams: int = sys.maxsize) -> list[list[Segment]]:
    """The segments in groups that are computed at once, in their order. One with more rows is a group of its own."""
    groups: list[list[Segment]] = []
    rows = 0
    for segment in segments:
        rows += segment.rows
        if not groups or len(groups[-1]) == most_streams or rows > most_rows:
            groups.append([])
            rows = segment.rows
        groups[-1].append(segment)
    return groups


def tokens_of(segments: Sequence[Segment]) -> NDArray[np.int64]:
    """The tokens of the rows that are computed, [N]."""
    return joined([each.batch.tokens[each.batch.known :] for each in segments])


def positions_of(segments: Sequence[Segment]) -> NDArray[np.int64]:
    """The positions of the rows that are computed, [N]."""
    return joined([each.batch.positions(each.cache.length - each.shift) for each in segments])


def kept_rows(segments: Sequence[Segment]) -> NDArray[np.int64]:
    """The rows whose logits are returned, among those that are computed, [M]."""
    parts, start = [], 0
    for each in segments:
        start += each.rows
        parts.append(np.arange(start - each.kept, start))
    return joined(parts)


def joined(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """The parts one after the other."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def keep_hidden(states: Any, segments: Sequence[Segment]) -> None:
    """Keeps the states of a forward's rows, [N, width], in the caches of its segments."""
    start = 0
    for each in segments:
        end, hidden = start + each.rows, each.cache.hidden
        if hidden is not None:
            hidden.write(each.cache.length + each.batch.known, states[start:end])
        start = end
