"""TorchScript of the installed version compiles functions, and records modules."""

from __future__ import annotations

import warnings

import pytest
import torch

from outrider.verify.model.cpu.torchscript import ScriptList, run, script, traced, without_warnings


@pytest.mark.parametrize("name", ["script", "trace", "freeze", "optimized_execution", "TracerWarning"])
def test_torchscript_is_there(name: str) -> None:
    here = f"PyTorch {torch.__version__}; torchscript.py says what to use instead."
    assert hasattr(torch, "ScriptList"), f"There is no torch.ScriptList in {here}"
    assert hasattr(torch.jit, name), f"There is no torch.jit.{name} in {here}"


def doubled(parts: list[torch.Tensor], skipped: int) -> torch.Tensor:
    return 2 * torch.cat(parts[skipped:])


class Layer(torch.nn.Module):
    """Multiplies by a weight, and calls a script whose loops depend on its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((2,), 3.0))
        self.script = script(doubled)
        self.calls = 0

    def forward(self, parts: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        self.calls += 1
        return (self.weight * self.script(parts, 1),)


def test_a_trace_runs_without_python() -> None:
    with without_warnings(), torch.no_grad():
        layer = Layer()
        found = traced(layer, ([torch.ones(1, 2), torch.ones(1, 2)],))
        calls = layer.calls
        (out,) = run(found, ScriptList([torch.ones(1, 2), torch.full((4, 2), 5.0)]))
    assert torch.equal(out, torch.full((4, 2), 30.0))
    assert layer.calls == calls


def test_deprecations_are_not_reported() -> None:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        with without_warnings():
            script(doubled)
            warnings.warn("deprecated", DeprecationWarning, stacklevel=1)
    assert not found
