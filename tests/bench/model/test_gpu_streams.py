"""Measurements of several streams, on a tiny model."""

from __future__ import annotations

import pytest

from bench.model import gpu_streams as streams
from outrider.verify.model.torch_runner import TorchRunner


def test_shared_forwards_are_timed(tiny_runner: TorchRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "REPEATS", 1)
    figures = streams.shared_forwards(tiny_runner, 20)
    assert figures["tokens_over_one_stream"]["1"] == 1.0
    assert [list(by) for by in figures["forward_ms"].values()] == [["1", "2", "4", "8"]] * 2


def test_streams_join_and_leave(tiny_runner: TorchRunner) -> None:
    assert streams.join_and_leave(tiny_runner, 40) > 0
