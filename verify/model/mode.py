"""How a runner computes: the backend, the invariant range, and which segments are computed in one forward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from outrider.drafters.interface import MAX_NODES
from outrider.verify.model.cpu.ordered_attention import AttentionInputs, padded, pieces
from outrider.verify.model.invariant_range import InvariantRange, depth_left
from outrider.verify.model.recurrent.states import ROWS
from outrider.verify.model.segment import ForwardBackend, Segment, is_chunk

# The most streams and rows of a forward without a backend.
MAX_STREAMS, MAX_ROWS = 16, 1024


@dataclass(frozen=True)
class Mode:
    """How a runner computes."""

    in_pages: bool  # caches are pages of a pool, as on a GPU
    is_recurrent: bool  # the model has recurrent layers
    bounds: InvariantRange | None = None  # if set, a row's logits have the same bits in every step
    inputs: AttentionInputs | None = None  # inputs of the attention in order, which keeps to `bounds` on a CPU
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
        return MAX_NODES if self.bounds is None or not self.in_pages else min(MAX_NODES, self.bounds.high - 1)

    def draft_depth(self, length: int) -> int:
        """The depth of the deepest node that a draft may have, after `length` tokens in the cache."""
        return MAX_NODES if self.bounds is None else depth_left(length)

    def is_apart(self, segment: Segment) -> bool:
        """Whether these rows are computed outside of the invariant range or of the graphs, because they are too many."""
        if self.in_pages:
            return len(segment.batch) > (min(ROWS, self.max_rows) if self.is_recurrent else self.max_rows)
        return self.bounds is not None and not self.bounds.has_prompts and is_chunk(segment)

    def is_untraced_chunk(self, segment: Segment) -> bool:
        """Whether these rows are a chunk of a prompt that the backend does not read."""
        reads_prompts = self.backend is not None and self.backend.reads_prompts
        return self.bounds is None and is_chunk(segment) and not reads_prompts

    def backend_for(self, segments: Sequence[Segment]) -> ForwardBackend | None:
        """The backend that computes these segments together; None if the untraced forward does."""
        if self.is_recurrent and not self.in_pages and any(map(is_chunk, segments)):
            return None  # recurrent layers read chunks in another form
        return self.backend

    def forwards(self, segments: Sequence[Segment]) -> list[tuple[list[int], list[Segment]]]:
        """What is computed at once: parts of segments, and these segments' numbers. A segment's parts are in order."""
        forwards: list[tuple[list[int], list[Segment]]] = []
        for number, segment in enumerate(segments):
            place = 0
            for part in self._parts(segment):
                while place < len(forwards) and not self._fits(part, forwards[place][1]):
                    place += 1
                if place == len(forwards):
                    forwards.append(([], []))
                forwards[place][0].append(number)
                forwards[place][1].append(part)
        return forwards

    def padded(self, segments: Sequence[Segment]) -> Sequence[Segment]:
        """The segments with as many rows as the attention in order needs."""
        if self.bounds is None or self.inputs is None:
            return segments
        *others, last = segments
        missing = self.bounds.low - sum(each.rows for each in segments)
        return [*others, last._replace(batch=padded(last.batch, last.rows + missing))]

    def _parts(self, segment: Segment) -> Iterator[Segment]:
        if self.bounds is None or self.inputs is None or self.is_apart(segment):
            return iter([segment])
        return (segment._replace(batch=part) for part in pieces(segment.batch, segment.cache.length, self.bounds))

    def _fits(self, part: Segment, others: Sequence[Segment]) -> bool:
        """Whether the part can be computed together with the others."""
        if any(self.is_apart(each) for each in (part, *others)):
            return False
        streams = MAX_STREAMS if self.backend is None else self.backend.max_streams
        return len(others) < streams and part.rows + sum(each.rows for each in others) <= self.max_rows
