"""The rows of one forward: tokens, positions relative to the committed text, and which rows attend to which."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from outrider.drafters.interface import DraftTree

ROOT_DEPTH = torch.zeros(1, dtype=torch.long)  # depths of a root alone


@dataclass(frozen=True, eq=False)
class ForwardBatch:
    """N rows that follow the committed tokens of a cache. All tensors are on the host.

    Every row attends to the committed tokens, to itself and to its ancestors among the rows.
    """

    tokens: torch.Tensor  # int64 [N]
    depths: torch.Tensor  # int64 [N]; position relative to the first row's
    ancestors: torch.Tensor | None = None  # bool [N, N]; row i attends to row j; None = causal: j <= i
    known: int = 0  # leading rows whose keys and values are in the cache already; only the others are computed
    padding: int = 0  # trailing rows that are computed, but whose logits are not returned

    @classmethod
    def chain(cls, tokens: torch.Tensor) -> ForwardBatch:
        """Consecutive tokens (int64 [N]): a chunk of the prompt, or the last committed token alone."""
        return cls(tokens, torch.arange(len(tokens)))

    @classmethod
    def tree(cls, root: int, tree: DraftTree) -> ForwardBatch:
        """The root (the last committed token) as row 0, and node i of the draft tree as row i + 1."""
        if not len(tree):
            return cls(torch.tensor([root]), ROOT_DEPTH)
        tokens = torch.from_numpy(np.concatenate([[root], tree.tokens]).astype(np.int64))
        depths = torch.from_numpy(np.concatenate([[0], tree.depths]).astype(np.int64))
        return cls(tokens, depths, torch.from_numpy(tree.ancestors))

    def part(self, start: int, end: int) -> ForwardBatch:
        """The rows from `start` to `end`, after a forward of those before."""
        ancestors = None if self.ancestors is None else self.ancestors[:end, :end]
        return ForwardBatch(self.tokens[:end], self.depths[:end], ancestors, start)

    def __len__(self) -> int:
        return len(self.tokens)

    def positions(self, length: int) -> torch.Tensor:
        """Positions of the rows to compute after `length` committed tokens, int64 [N - known]."""
        return self.depths[self.known :] + length

    @property
    def is_chain_end(self) -> bool:
        """Whether one row is computed, and it attends to all others."""
        return self.known == len(self) - 1 and (self.ancestors is None or bool(self.ancestors[-1].all()))

    def ancestor_mask(self) -> torch.Tensor:
        """Which rows each row attends to, itself included, bool [N, N]."""
        if self.ancestors is not None:
            return self.ancestors
        return torch.ones(len(self), len(self), dtype=torch.bool).tril()
