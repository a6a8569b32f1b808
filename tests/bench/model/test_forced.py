"""Forced replay emits recorded answers."""

from __future__ import annotations

import numpy as np
import pytest

from bench.model.forced import Recorded, forced_answer, select_fitting
from bench.plan import BenchError
from bench.recordings import Line
from outrider.drafters.registry import Resources
from outrider.verify.model.torch_runner import TorchRunner


@pytest.mark.parametrize("name", ["none", "lookup", "fusion"])
def test_a_forced_answer_takes_fewer_steps_with_drafts(tiny_runner: TorchRunner, name: str) -> None:
    answer = np.array([5, 6, 7, 8, 9, 10] * 6, np.int32)
    line = Line(np.array([5, 6, 7, 8, 9, 10, 5], np.int32), answer)
    decoded = forced_answer(tiny_runner, name, Resources(vocabulary=98), line, 16, None)
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


def test_a_prompt_keeps_the_end_that_fits() -> None:
    line = Line(np.arange(7, dtype=np.int32), np.zeros(24, np.int32))
    assert [line.prompt.tolist() for line in select_fitting([line], 50)] == [list(range(7))]
    long = Line(np.arange(90, dtype=np.int32), np.zeros(24, np.int32))
    assert select_fitting([long], 64)[0].prompt.tolist() == list(range(51, 90))
