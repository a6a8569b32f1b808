"""Makes a row's bits independent of the others: blocks of text summed in order, and numbers of rows that agree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# Whether a mode is looked for; on = an error if there is none.
Invariant = Literal["auto", "on", "off"]
# The positions of a block. A step's rows lie in one block.
BLOCK = 64


@dataclass(frozen=True)
class InvariantRange:
    """Numbers of rows for which a machine's kernels give each row the same bits."""

    low: int  # rows of a forward; fewer are padded
    high: int  # more are computed in several forwards


def depth_left(length: int) -> int:
    """Positions of the block that follow the root, after `length` committed tokens."""
    return BLOCK - 1 - length % BLOCK
