"""What makes a row's bits independent of the others: blocks of text summed in order, and numbers of rows that agree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# Whether a mode is looked for; on = an error if there is none.
Invariant = Literal["auto", "on", "off"]
# The positions of a block. A step's rows lie in one block.
BLOCK = 64
PROMPT_ROWS = 512
# On a CPU, flash attention computes this many rows together, and multiples of it if there are many.
QUERY_BLOCK = 32


@dataclass(frozen=True)
class InvariantRange:
    """Numbers of rows for which a machine's kernels give each row the same bits."""

    low: int  # rows of a forward; fewer are padded
    high: int  # more are computed in several forwards
    queries: int  # smallest remainder of attention rows (rows times query heads per key head) modulo QUERY_BLOCK

    @property
    def has_prompts(self) -> bool:
        """Whether prompts are read in the range, too; with fewer rows at once, that would take too long."""
        return self.high >= PROMPT_ROWS

    def padded_queries(self, rows: int) -> int:
        """The number of attention rows that `rows` are padded to."""
        remainder = rows % QUERY_BLOCK
        return rows if not remainder or remainder >= self.queries else rows - remainder + self.queries


def depth_left(length: int) -> int:
    """Positions of the block that follow the root, after `length` committed tokens."""
    return BLOCK - 1 - length % BLOCK
