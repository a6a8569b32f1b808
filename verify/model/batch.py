"""The rows of one forward: tokens, positions relative to the committed text, and which rows attend to which.

A forward may be over several streams: the rows of each follow its own cache, and attend to nothing of another stream.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from outrider.drafters.interface import DraftTree

if TYPE_CHECKING:
    from outrider.verify.model.adapter import Adapter
    from outrider.verify.model.pictures import Picture

ROOT_DEPTH = np.zeros(1, np.int64)  # depths of a root alone


@dataclass(frozen=True, eq=False)
class ForwardBatch:
    """N rows that follow the committed tokens of a cache.

    Every row attends to the committed tokens, to itself and to its ancestors among the rows.
    """

    tokens: NDArray[np.int64]  # [N]
    depths: NDArray[np.int64]  # [N]; position relative to the first row's
    ancestors: NDArray[np.bool_] | None = None  # [N, N]; row i attends to row j; None = causal: j <= i
    known: int = 0  # leading rows whose keys and values are in the cache already; only the others are computed

    @classmethod
    def chain(cls, tokens: ArrayLike) -> ForwardBatch:
        """Consecutive tokens, [N]: a chunk of the prompt, or the last committed token alone."""
        found = np.asarray(tokens, np.int64)
        return cls(found, np.arange(len(found)))

    @classmethod
    def tree(cls, root: int, tree: DraftTree) -> ForwardBatch:
        """The root (the last committed token) as row 0, and node i of the draft tree as row i + 1."""
        if not len(tree):
            return cls(np.array([root], np.int64), ROOT_DEPTH)
        tokens = np.concatenate([[root], tree.tokens]).astype(np.int64)
        depths = np.concatenate([[0], tree.depths]).astype(np.int64)
        return cls(tokens, depths, tree.ancestors)

    def part(self, start: int, end: int) -> ForwardBatch:
        """The rows from `start` to `end`, after a forward of those before."""
        ancestors = None if self.ancestors is None else self.ancestors[:end, :end]
        return ForwardBatch(self.tokens[:end], self.depths[:end], ancestors, start)

    def __len__(self) -> int:
        return len(self.tokens)

    def positions(self, length: int) -> NDArray[np.int64]:
        """Positions of the rows to compute after `length` committed tokens, [N - known]."""
        return self.depths[self.known :] + length

    @property
    def is_chain_end(self) -> bool:
        """Whether one row is computed, and it attends to all others."""
        return self.known == len(self) - 1 and (self.ancestors is None or bool(self.ancestors[-1].all()))

    def ancestor_mask(self) -> NDArray[np.bool_]:
        """A mask of the rows to which each row attends, itself included, [N, N]."""
        return np.tri(len(self), dtype=np.bool_) if self.ancestors is None else self.ancestors


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
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def keep_hidden(states: Any, segments: Sequence[Segment]) -> None:
    """Keeps the states of a forward's rows, [N, width], in the caches of its segments."""
    start = 0
    for each in segments:
        end, hidden = start + each.rows, each.cache.hidden
        if hidden is not None:
            hidden.write(each.cache.length + each.batch.known, states[start:end])
        start = end
