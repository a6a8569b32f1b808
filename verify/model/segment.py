"""A forward over several streams: the rows of each follow its own cache, and attend to nothing of another stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from outrider.drafters.interface import MAX_NODES
from outrider.verify.model.adapter import Adapter
from outrider.verify.model.batch import ForwardBatch
from outrider.verify.model.cache.kv_cache import KVCache
from outrider.verify.model.pictures import Picture
from outrider.verify.model.recurrent.rows import Recurrence, RecurrentRows


class Segment(NamedTuple):
    """The rows of one stream in a forward."""

    cache: KVCache
    batch: ForwardBatch
    logits: bool = True  # whether all computed rows have logits, not only the last one; rows of padding have none
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
        return self.rows - self.batch.padding if self.logits else 1


class ForwardBackend(Protocol):
    """A faster forward."""

    max_streams: int
    max_rows: int
    reads_prompts: bool  # also if a chunk of a prompt is all that is computed
    is_invariant: bool  # a row has the same bits beside any others

    def __call__(self, segments: Sequence[Segment]) -> torch.Tensor:
        """The logits of the segments' rows, one segment after the other, [M, V]; valid until the next call."""


def tokens_of(segments: Sequence[Segment]) -> torch.Tensor:
    """The tokens of the rows that are computed, int64 [N]."""
    parts = [each.batch.tokens[each.batch.known :] for each in segments]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def positions_of(segments: Sequence[Segment]) -> torch.Tensor:
    """The positions of the rows that are computed, int64 [N]."""
    parts = [each.batch.positions(each.cache.length - each.shift) for each in segments]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def kept_rows(segments: Sequence[Segment], least: int = 1) -> torch.Tensor:
    """The rows whose logits are returned, among those that are computed, int64 [M]; the last one again, for `least` rows."""
    parts, start = [], 0
    for each in segments:
        start += each.rows
        end = start - each.batch.padding
        parts.append(torch.arange(end - each.kept, end))
    kept = parts[0] if len(parts) == 1 else torch.cat(parts)
    return kept if len(kept) >= least else torch.cat([kept, kept[-1:].expand(least - len(kept))])


def recurrence_of(segments: Sequence[Segment]) -> Recurrence:
    """The rows of the segments in recurrent layers."""
    states = [(each.cache.recurrent, each) for each in segments]
    return Recurrence([RecurrentRows(state, each.cache.length, each.batch) for state, each in states if state is not None])


def is_chunk(segment: Segment) -> bool:
    """Whether these rows are a part of a prompt, not a step."""
    return not segment.logits or segment.rows > MAX_NODES + 1


def keep_hidden(states: torch.Tensor, segments: Sequence[Segment], whole: bool = False) -> None:
    """Keeps the states of a forward's rows, [N, width], in the caches of its segments.

    With `whole`, the forward has also computed the known rows.
    """
    start = 0
    for cache, batch, *_ in segments:
        known = 0 if whole else batch.known
        end = start + len(batch) - known
        if cache.hidden is not None:
            cache.hidden.write(cache.length + known, states[start : end - batch.padding])
        start = end
