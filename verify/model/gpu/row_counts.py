"""The numbers of rows for which a GPU's forwards are captured, and the ranges of them in which a row has the same bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from outrider.verify.model.invariant_range import InvariantRange

# Each range reaches at least this many rows: a root and 71 nodes.
RANGE_ROWS = 72
# 72 and 136: a root and 64 or 128 nodes, and more up to a multiple of the tensor cores' tiles.
ROWS = (1, 2, 4, 8, 16, 32, 64, RANGE_ROWS, 128, 136, 256)
# Torch.compile makes a kernel of its own for one row, so a range that begins with two is tried as well. It costs nothing.
FEW_ROWS = 2


def invariant_ranges(products: Sequence[Mapping[int, torch.Tensor]]) -> list[InvariantRange]:
    """Ranges to try, from outputs of each distinct layer by number of rows; those that pad steps least come first.

    A draft has at most as many nodes as its range has room for (`Mode.draft_nodes`). In the last range, all forwards have the
    same number of rows, so it needs nothing of the kernels but that a row's place among the others does not matter.
    """
    ranges = []
    for high in (count for count in ROWS if count >= RANGE_ROWS):
        low = high
        for count in reversed([count for count in ROWS if count < high]):
            if not all(torch.equal(outputs[count], outputs[high][:count]) for outputs in products):
                break
            low = count
        ranges.append(InvariantRange(low, high))
    ranges.sort(key=lambda bounds: (bounds.low, -bounds.high))
    few = [replace(each, low=FEW_ROWS) for each in ranges[:1] if each.low < FEW_ROWS]
    return [*ranges[:1], *few, InvariantRange(RANGE_ROWS, RANGE_ROWS)]
