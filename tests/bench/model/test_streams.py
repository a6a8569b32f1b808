"""Several recorded answers at once, and a prompt that is read during their steps, on a tiny model."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from bench.model import streams
from bench.model.forced import forced_stream
from bench.recordings import Line
from outrider.drafters.registry import Resources
from outrider.verify.model.torch_runner import TorchRunner
from outrider.verify.stream import Stream


def lines(tokens: int) -> list[Line]:
    """Two recorded answers of this length."""
    return [Line(np.array([5, number], np.int32), np.arange(tokens, dtype=np.int32) % 90) for number in range(2)]


def stream_of(runner: TorchRunner, line: Line) -> Stream:
    return forced_stream(runner, "none", Resources(vocabulary=98), line, 0, None)


@pytest.mark.parametrize(("tokens", "is_measured"), [(2, False), (60, True)])
def test_a_prompt_is_measured_only_beside_answers_that_outlast_it(
    tiny_runner: TorchRunner, monkeypatch: pytest.MonkeyPatch, tokens: int, is_measured: bool
) -> None:
    monkeypatch.setattr(streams, "PROMPT_TOKENS", 40)
    monkeypatch.setattr(streams, "PLAIN_ROUNDS", 3)
    start = partial(stream_of, tiny_runner)
    found = streams.prompt_beside_streams(tiny_runner, lines(tokens), start, None)
    assert (found is not None) == is_measured
    assert found is None or found["alone_seconds"] > 0


@pytest.mark.parametrize("advance", [streams.together, streams.in_turns])
def test_all_answers_are_decoded(tiny_runner: TorchRunner, advance: streams.Advance) -> None:
    started: list[Line] = []

    def start(line: Line) -> Stream:
        started.append(line)
        return stream_of(tiny_runner, line)

    given = lines(3) * 2
    assert streams.tokens_per_second(given, start, 2, advance) > 0
    assert started == given


def test_a_measurement_that_is_missing_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    results = [{"streams": "1", "tokens_per_second": 1.0, "over_turns": 1.0}]
    streams.show({"drafter": "none", "results": results, "prompt_beside_streams": []})
    assert "not measured, because the recorded answers end before it is read" in capsys.readouterr().out
