"""Several recorded answers at once, on a tiny model: forced replay emits what was recorded."""

import numpy as np
import pytest

from bench.model import streams
from bench.model.streams import forced_stream, select_fitting
from bench.plan import BenchError
from bench.recordings import Line
from outrider.drafters.registry import Resources
from outrider.verify.decode import finish
from outrider.verify.model.torch_runner import TorchRunner
from outrider.verify.stream import Stream


@pytest.mark.parametrize("name", ["none", "lookup", "fusion"])
def test_a_forced_answer_takes_fewer_steps_with_drafts(tiny_runner: TorchRunner, name: str) -> None:
    answer = np.array([5, 6, 7, 8, 9, 10] * 6, np.int32)
    line = Line(np.array([5, 6, 7, 8, 9, 10, 5], np.int32), answer)
    decoded = finish(forced_stream(tiny_runner, name, Resources(vocabulary=98), line, 16, None))
    assert decoded.tokens == answer.tolist()
    assert len(decoded.steps) == len(answer) if name == "none" else len(decoded.steps) < 20


@pytest.mark.parametrize("advance", [streams.together, streams.in_turns])
def test_all_answers_are_decoded(tiny_runner: TorchRunner, advance: streams.Advance) -> None:
    started: list[Line] = []

    def start(line: Line) -> Stream:
        started.append(line)
        return forced_stream(tiny_runner, "none", Resources(vocabulary=98), line, 0, None)

    given = [Line(np.array([5, number], np.int32), np.arange(3, dtype=np.int32)) for number in range(2)] * 2
    assert streams.tokens_per_second(given, start, 2, advance) > 0
    assert started == given


def test_only_answers_below_half_of_the_context_are_selected() -> None:
    lines = [Line(np.zeros(3, np.int32), np.zeros(length, np.int32)) for length in (1, 2, 49, 50)]
    assert [len(line.answer) for line in select_fitting(lines, 100)] == [2, 49]
    with pytest.raises(BenchError, match="fits the context"):
        select_fitting(lines[-1:], 100)
