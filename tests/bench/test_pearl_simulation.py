"""The simulation of PEARL: the ideal figures, and the measured ones."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from bench.pearl_simulation import Clock, agreement, ideal_steps, ideal_tokens_per_step, show, simulate, with_errors


@pytest.mark.parametrize(("rate", "window"), [(0.5, 3), (0.7, 5), (0.9, 8)])
def test_the_expected_ideal_is_the_mean_of_random_draws(rate: float, window: int) -> None:
    random = np.random.default_rng(0)
    tokens, post = 0, False
    for _ in range(100_000):
        right = int(random.geometric(1 - rate)) - 1  # right guesses before the first wrong one
        tokens += 1 + min(right, window - 1) if post else 1
        post = right >= window if post else right >= 1
    assert tokens / 100_000 == pytest.approx(ideal_tokens_per_step(rate, window), rel=0.02)


def test_the_ideal_of_a_draw_is_near_the_expected_one() -> None:
    right = agreement(0.8, 200_000, 1)
    assert 200_000 / ideal_steps(right, 199_000, 5) == pytest.approx(ideal_tokens_per_step(0.8, 5), rel=0.02)
    assert ideal_steps(np.ones(100, np.bool_), 41, 5) == 9  # one token, then five at a time
    assert ideal_steps(np.zeros(100, np.bool_), 41, 5) == 41


def test_the_loop_accepts_the_expected_number_of_tokens() -> None:
    found = simulate(3, 0.7, 200, 0.0005)
    assert found["accepted_over_theory"] == pytest.approx(1.0, abs=0.03)
    assert found["both_busy"] <= min(found["draft_busy"], found["verify_busy"])


def test_the_share_of_right_guesses_is_exact() -> None:
    assert agreement(0.7, 1000, 3).sum() == 700


def test_shares_of_busy_time() -> None:
    clock = Clock({"draft": [(0.0, 2.0), (3.0, 4.0)], "verify": [(1.0, 3.5), (5.0, 6.0)]})
    assert clock.shares(10.0) == {"draft_busy": 0.3, "verify_busy": 0.35, "both_busy": 0.15}


def test_only_wrong_tokens_differ() -> None:
    assert with_errors(np.array([2, 4, 6], np.int32), np.array([True, False, True])).tolist() == [2, 5, 6]


def test_the_table_fits_80_columns(printed: Callable[[], str]) -> None:
    row = simulate(8, 0.9, 10, 0.0001)
    show([row | {"tokens_per_second": 12345.67, "ideal_tokens_per_second": 12345.68, "mean_accepted": 123.456}])
    text = printed()
    assert all(cell in text for cell in ("12345.67", "12345.68", "123.456", "9.000"))
