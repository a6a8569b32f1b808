"""The time that rounds may have that read parts of prompts."""

from __future__ import annotations

import pytest

from verify.pace import READING_FACTOR, Pace


def test_rounds_with_a_prompt_may_take_a_multiple_of_those_without() -> None:
    pace = Pace()
    assert pace.limit(3, predicted=0.030) == pytest.approx(READING_FACTOR * 0.030)  # nothing has been measured
    for _ in range(30):
        pace.record(3, 0.020)
        pace.record(1, 0.010)
    assert pace.limit(3, predicted=0.030) == pytest.approx(READING_FACTOR * 0.020)
    assert pace.limit(1, predicted=0.030) == pytest.approx(READING_FACTOR * 0.010)
    assert pace.limit(2, predicted=0.030) == pytest.approx(READING_FACTOR * 0.030)


def test_predictions_are_corrected() -> None:
    """Rounds that take longer than predicted get less to read."""
    pace = Pace(max_seconds=0.060)
    assert pace.limit(3, predicted=0.030) == pytest.approx(0.060)
    for _ in range(100):
        pace.record_reading(0.060, 0.090)
    assert pace.limit(3, predicted=0.030) == pytest.approx(0.040, rel=1e-3)
    unmeasured = Pace()
    for _ in range(100):
        unmeasured.record_reading(0.060, 0.090)
    assert unmeasured.limit(3, predicted=0.030) == pytest.approx(READING_FACTOR * 0.030)


def test_a_round_that_something_else_delayed_counts_little() -> None:
    pace = Pace()
    for _ in range(30):
        pace.record(1, 0.010)
    pace.record(1, 10.0)
    pace.record_reading(0.020, 10.0)
    assert pace.limit(1, predicted=0.010) < READING_FACTOR * 0.013
