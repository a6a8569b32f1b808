"""Read bandwidth and linear layers are timed on a tiny model."""

from __future__ import annotations

import pytest

from bench.model import bandwidth
from outrider.verify.model.torch_runner import TorchRunner


def test_read_bandwidth_is_positive(tiny_runner: TorchRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "CPU_PROBE_BYTES", 1 << 20)
    assert bandwidth.read_bytes_per_second(tiny_runner) > 1e6


def test_the_linear_layers_run_alone(tiny_runner: TorchRunner) -> None:
    once = bandwidth.linear_pass(tiny_runner)
    assert 0 < min(once() for _ in range(3)) < 1
