"""Steps of a known shape: every node count is timed, and the tables fit 80 columns."""

from __future__ import annotations

import pytest

from bench.model import steps
from bench.model.steps import make_runner, short_rounds
from bench.plan import BenchError
from outrider.server.settings import Settings
from outrider.verify.model.torch_runner import TorchRunner


def test_an_unknown_shape_is_reported(exact: Settings) -> None:
    with pytest.raises(BenchError, match="no shape 'huge'"):
        make_runner("huge", exact)


def test_a_round_times_the_layers_and_every_step(tiny_runner: TorchRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "ROUNDS", 2)
    monkeypatch.setattr(steps, "STEP_NODES", (0, 4))
    monkeypatch.setattr(steps, "CONTEXTS", (16,))
    rounds = short_rounds(tiny_runner)
    assert [len(seconds) for _, seconds in rounds] == [2, 2]
    assert all(linear > 0 and min(seconds) > 0 for linear, seconds in rounds)
