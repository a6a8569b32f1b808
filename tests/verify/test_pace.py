"""The time that rounds may have that read parts of prompts."""

from __future__ import annotations

import pytest

from outrider.verify.pace import READING_FACTOR, Pace


def test_a_round_with_a_prompt_may_take_a_multiple_of_its_steps() -> None:
    assert Pace().limit(0.030) == pytest.approx(READING_FACTOR * 0.030)
    assert Pace(max_seconds=0.050).limit(0.030) == 0.050


def test_predictions_are_corrected() -> None:
    """Rounds that take longer than predicted get less to read, unless their steps take longer, too."""
    pace, fixed = Pace(), Pace(max_seconds=0.060)
    for each in (pace, fixed):
        for _ in range(100):
            each.record(True, 0.060, 0.090)
    assert pace.limit(0.030) == pytest.approx(READING_FACTOR * 0.020, rel=1e-3)
    assert fixed.limit(0.030) == pytest.approx(0.040, rel=1e-3)
    for each in (pace, fixed):
        for _ in range(100):
            each.record(False, 0.030, 0.045)
    assert pace.limit(0.030) == pytest.approx(READING_FACTOR * 0.030, rel=1e-3)
    assert fixed.limit(0.030) == pytest.approx(0.040, rel=1e-3)


def test_a_round_with_long_drafts_takes_no_longer_than_the_usual_one() -> None:
    pace = Pace()
    for _ in range(100):
        pace.record(False, 0.030, 0.030)
    assert pace.limit(0.060) < READING_FACTOR * 0.036


def test_the_usual_time_follows_further_streams_without_a_round_of_steps_alone() -> None:
    pace = Pace()
    for _ in range(100):
        pace.record(False, 0.030, 0.030)
    for _ in range(100):
        limit = pace.limit(0.060)
    assert limit == pytest.approx(READING_FACTOR * 0.060, rel=1e-3)


def test_a_round_that_something_else_delayed_counts_little() -> None:
    pace = Pace()
    for reads in (False, True):
        pace.record(reads, 0.030, 10.0)
        assert READING_FACTOR * 0.030 / 1.2 <= pace.limit(0.030) <= READING_FACTOR * 0.030 * 1.2


def test_a_slow_model_reads_a_prompt_in_small_parts() -> None:
    """So that no part takes longer than the worker may be silent."""
    pace = Pace(silent_seconds=12.0)
    assert pace.chunk(512) < 512  # the first one, whose time is not known
    pace.record_chunk(64, 32.0)
    assert pace.chunk(512) == 24
    pace.record_chunk(24, 240.0)
    assert 0 < pace.chunk(512) <= 8
    pace.record_chunk(8, 0.008)
    assert pace.chunk(512) == 512
    assert Pace().chunk(512) == 512
