"""Classes of captured numbers of rows, found from what layers compute."""

from __future__ import annotations

import torch

from outrider.verify.model.gpu.row_counts import RANGE_ROWS, ROWS, invariant_ranges
from outrider.verify.model.invariant_range import InvariantRange


def outputs(kernels: dict[int, int]) -> dict[int, torch.Tensor]:
    """What a layer computes by number of rows, if each number has a kernel with this rounding."""
    return {count: torch.full((count, 2), float(kernels.get(count, 0))) for count in ROWS}


def test_a_class_has_the_numbers_for_which_all_layers_agree() -> None:
    one_number = InvariantRange(RANGE_ROWS, RANGE_ROWS)
    assert invariant_ranges([outputs({}), outputs({1: 7, 2: 7})]) == [InvariantRange(4, 256), one_number]
    assert invariant_ranges([outputs({128: 7, 256: 7}), outputs({1: 8, 16: 8})]) == [InvariantRange(32, RANGE_ROWS), one_number]
    assert invariant_ranges([outputs({count: count for count in ROWS})])[-1] == one_number


def test_a_layer_in_which_the_place_of_a_row_matters_agrees_with_nothing() -> None:
    changing = {count: torch.full((count, 2), torch.nan) for count in ROWS}
    assert all(rows.low == rows.high for rows in invariant_ranges([changing]))
