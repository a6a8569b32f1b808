"""The numbers of rows for which a GPU's forwards are captured, and the ranges of them in which a row has the same bits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from outrider.verify.model.invariant_range import InvariantRange

# Each range reaches at least this many rows: a root and 71 nodes.
RANGE_ROWS = 72
# 72 and 136: a root and 64 or 128 nodes, and more up to a multiple of the tensor cores' tiles.
ROWS = (1, 2, 4, 8, 16, 32, 64, RANGE_ROWS, 128, 136, 256)


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
        ranges.append(InvariantRange(low, high, 1))
    ranges.sort(key=lambda bounds: (bounds.low, -bounds.high))
    return [*ranges[:1], InvariantRange(RANGE_ROWS, RANGE_ROWS, 1)]


@contextmanager
def without_split_k() -> Iterator[None]:
    """Matrix products inside sum along their inner dimension in one go: how it is split would depend on the number of rows."""
    settings = torch.backends.cuda.matmul
    names = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
    before = {name: (getattr(settings, name), getattr(settings, f"{name}_split_k")) for name in names}
    for name in names:
        setattr(settings, name, (False, False))
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(settings, name, value)
