"""The last half of the lines profits from the first one, if they are alike."""

from __future__ import annotations

import numpy as np

from bench.ablations.learned import compare
from bench.recordings import Line
from outrider.drafters.registry import Resources

TEXT = np.arange(100, 160, dtype=np.int32)


def test_repeated_answers_are_drafted_from_earlier_sessions() -> None:
    lines = [Line(TEXT[:3], TEXT[3:])] * 2
    figures = compare(lines, Resources(vocabulary=200), 1000)
    assert figures["alone"] == 1.0
    assert figures["learned"] > 10
    assert figures["gain"] > 9
    assert compare(lines, Resources(vocabulary=200), 1)["gain"] == 0
