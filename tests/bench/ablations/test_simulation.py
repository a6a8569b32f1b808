"""The simulation of PEARL's loop."""

from __future__ import annotations

import numpy as np
import pytest

from bench.ablations.simulation import agreement, closed_form, run_loop, simulate, with_errors


def test_the_loop_accepts_the_expected_number_of_tokens() -> None:
    """Between two rejections, a / (1 - a) tokens are accepted on average (the sum in the proof of the paper's Theorem 2)."""
    rate = 0.7
    drafter, _ = run_loop(3, rate, 200, 0.0005, 3)
    assert drafter.accepted_tokens / drafter.rejections == pytest.approx(rate / (1 - rate), rel=0.03)


def test_the_share_of_right_guesses_is_exact() -> None:
    assert agreement(0.7, 1000, 3).sum() == 700


def test_only_wrong_tokens_differ() -> None:
    assert with_errors(np.array([2, 4, 6], np.int32), np.array([True, False, True])).tolist() == [2, 5, 6]


def test_each_window_has_a_speed() -> None:
    assert all(simulate(3, 0.9, 10, 0.0001, window) > 0 for window in (2, 3, 6))


def test_the_closed_form_is_largest_for_a_window_of_c() -> None:
    """Theorem 1; the figures are rounded."""
    assert [round(closed_form(3, 0.85, 0.004, window)) for window in range(1, 6)] == [83, 137, 173, 150, 132]
    for ratio in (2, 3, 5, 8):
        for rate in (0.3, 0.7, 0.95):
            speeds = [closed_form(ratio, rate, 0.004, window) for window in range(1, 33)]
            assert int(np.argmax(speeds)) + 1 == ratio
