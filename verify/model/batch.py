"""The rows of one forward: tokens, positions relative to the committed text, and which rows attend to which."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from outrider.drafters.interface import DraftTree

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
