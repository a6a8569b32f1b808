"""How a runner computes: the backend, the invariant range, and which segments are computed in one forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.drafters.interface import MAX_NODES
from outrider.verify.model.invariant_range import InvariantRange, depth_left
from outrider.verify.model.recurrent.states import ROWS
from outrider.verify.model.segment import ForwardBackend, Segment

# The most streams and rows of a forward without a backend.
MAX_STREAMS, MAX_ROWS = 16, 1024


@dataclass(frozen=True)
class Mode:
    """How a runner computes."""

    in_pages: bool  # caches are pages of a pool, as on a GPU
    is_recurrent: bool  # the model has recurrent layers
    bounds: InvariantRange | None = None  # if set, a row's logits have the same bits in every step
    backend: ForwardBackend | None = None

    @property
    def max_rows(self) -> int:
        """The most rows that are computed at once if they belong to several streams."""
        if self.bounds is not None:
            return self.bounds.high
        return MAX_ROWS if self.backend is None else self.backend.max_rows

    @property
    def draft_nodes(self) -> int:
        """The most nodes that a draft may have: graphs of an invariant range take no more rows."""
        return MAX_NODES if self.bounds is None else min(MAX_NODES, self.bounds.high - 1)

    def draft_depth(self, length: int) -> int:
        """The depth of the deepest node that a draft may have, after `length` tokens in the cache."""
        return MAX_NODES if self.bounds is None else depth_left(length)

    def is_apart(self, segment: Segment) -> bool:
        """Whether these rows are computed outside of the graphs, because they are too many.

        In an invariant range, none are: the bits of a prompt's keys and values do not depend on how it was cut.
        """
        if self.is_recurrent:
            return self.in_pages and len(segment.batch) > min(ROWS, self.max_rows)
        return self.in_pages and self.bounds is None and len(segment.batch) > self.max_rows

    def forwards(self, segments: Sequence[Segment]) -> list[tuple[list[int], list[Segment]]]:
        """Groups segments that are computed at once, with their numbers."""
        forwards: list[tuple[list[int], list[Segment]]] = []
        for number, segment in enumerate(segments):
            fitting = (each for each in forwards if self._fits(segment, each[1]))
            numbers, together = next(fitting, ([], []))
            if not together:
                forwards.append((numbers, together))
            numbers.append(number)
            together.append(segment)
        return forwards

    def _fits(self, segment: Segment, others: Sequence[Segment]) -> bool:
        """Whether the segment can be computed together with the others."""
        if any(self.is_apart(each) for each in (segment, *others)):
            return False
        streams = MAX_STREAMS if self.backend is None else self.backend.max_streams
        return len(others) < streams and segment.rows + sum(each.rows for each in others) <= self.max_rows
