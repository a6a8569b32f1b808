"""The seconds of a start by part."""

import logging
import time

import pytest

from outrider.verify.start_times import timed


@pytest.mark.parametrize(("seconds", "level"), [(0.2, logging.DEBUG), (7.25, logging.INFO)])
def test_long_parts_of_a_start_are_in_the_log(
    seconds: float, level: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    times = iter((3.0, 3.0 + seconds))
    monkeypatch.setattr(time, "perf_counter", lambda: next(times))
    with caplog.at_level(logging.DEBUG), timed("loading weights"):
        pass
    [record] = caplog.records
    assert (record.levelno, record.getMessage()) == (level, f"loading weights took {seconds:.1f} s")
