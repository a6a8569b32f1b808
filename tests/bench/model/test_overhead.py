"""Steps against forwards: drafts are accepted as planned, and every setting is measured."""

from __future__ import annotations

import numpy as np
import pytest

from bench.model import overhead
from outrider.drafters.interface import Verdict
from outrider.verify.model.torch_runner import TorchRunner
from outrider.verify.sampling_params import SamplingParams
from outrider.verify.verifier import Verifier


def test_every_setting_is_measured(tiny_runner: TorchRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "PROMPT_TOKENS", 20)
    monkeypatch.setattr(overhead, "ROUNDS", 2)
    figures = overhead.step_over_forward(tiny_runner)
    assert set(figures) == set(overhead.SETTINGS)
    assert all(row["step_over_forward"] > 0 for by in figures.values() for row in by.values())


def test_two_nodes_are_accepted(tiny_runner: TorchRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    accepted = []

    class Watched(Verifier):
        def commit(self, verdict: Verdict) -> None:
            accepted.append(len(verdict.path))
            super().commit(verdict)

    monkeypatch.setattr(overhead, "ROUNDS", 3)
    verifier = Watched(tiny_runner, tiny_runner.new_cache())
    overhead.paired(tiny_runner, verifier, np.arange(20, dtype=np.int32), SamplingParams(seed=2), 0, 8)
    assert accepted == [0, 0, overhead.ACCEPTED, overhead.ACCEPTED, overhead.ACCEPTED]
