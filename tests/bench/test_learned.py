"""The last half of the lines profits from the first one, if they are alike."""

from __future__ import annotations

import numpy as np

from bench.learned import compare
from bench.recordings import Line
from drafters.registry import Resources

TEXT = np.arange(100, 160, dtype=np.int32)


def test_repeated_answers_are_drafted_from_earlier_sessions() -> None:
    lines = [Line(TEXT[:3], TEXT[3:])] * 2
    rows = {row["drafter"]: row for row in compare(lines, Resources(vocabulary=200), 1000)}
    assert rows["fusion"]["alone"] == 1.0
    assert rows["fusion"]["learned"] > 10
    assert rows["retrieval"]["gain"] > 0
    assert compare(lines, Resources(vocabulary=200), 1)[0]["gain"] == 0
