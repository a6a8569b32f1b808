"""Forced replay emits recorded answers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from bench.model.forced import Recorded, forced_answer, select_fitting, show
from bench.plan import BenchError
from bench.recordings import Line
from outrider.drafters.registry import Resources
from outrider.verify.model.runner import ModelRunner


@pytest.mark.parametrize("name", ["none", "lookup", "fusion"])
def test_a_forced_answer_takes_fewer_steps_with_drafts(tiny_runner: ModelRunner, name: str) -> None:
    answer = np.array([5, 6, 7, 8, 9, 10] * 6, np.int32)
    line = Line(np.array([5, 6, 7, 8, 9, 10, 5], np.int32), answer)
    decoded = forced_answer(tiny_runner, name, Resources(vocabulary=98), line, 16, None)  # type: ignore[arg-type]
    assert decoded.tokens == answer.tolist()
    assert len(decoded.steps) == len(answer) if name == "none" else len(decoded.steps) < 20


def test_token_0_follows_the_recorded_answer() -> None:
    recorded = Recorded(np.array([4, 5], np.int32))
    assert [recorded._next(position) for position in range(3)] == [4, 5, 0]


def test_only_answers_below_half_of_the_context_are_selected() -> None:
    lines = [Line(np.zeros(3, np.int32), np.zeros(length, np.int32)) for length in (1, 2, 49, 50)]
    assert [len(line.answer) for line in select_fitting(lines, 100)] == [2, 49]
    with pytest.raises(BenchError, match="fits the context"):
        select_fitting(lines[-1:], 100)


def test_the_table_fits_80_columns(printed: Callable[[], str]) -> None:
    names = ("tokens_per_second", "tokens_per_step", "draft_ms_per_step", "verify_ms_per_step", "times_draft-graph")
    show([{"drafter": "draft-graph", **dict.fromkeys(names, 12345.6789)}], "draft-graph")
    assert printed().count("12345.679") == 4
