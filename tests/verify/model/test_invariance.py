"""Invariant rows: a range is found, and drafted answers equal plain decoding's bit for bit in bfloat16."""

import copy
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.drafters.interface import MAX_NODES
from outrider.verify.errors import ModelError
from outrider.verify.model import invariance
from outrider.verify.model.gpu.row_counts import ROWS
from outrider.verify.model.invariance import ProbeResult, start
from outrider.verify.model.invariant_range import Invariant, InvariantRange
from outrider.verify.model.mode import Mode
from outrider.verify.model.segment import Segment
from outrider.verify.model.torch_runner import TorchRunner

CONTEXT = 512


def runner_of(config: LlamaConfig, dtype: torch.dtype) -> TorchRunner:
    """A random model with a longer context, not started."""
    config = copy.deepcopy(config)
    config.max_position_embeddings = CONTEXT
    torch.manual_seed(1)
    return TorchRunner(LlamaForCausalLM(config).to(dtype), CONTEXT, pack=True, started=False)


@pytest.fixture
def paged(monkeypatch: pytest.MonkeyPatch) -> list[InvariantRange | None]:
    """Runners are as on a GPU, but start without kernels; returns the ranges in which they start."""
    starts: list[InvariantRange | None] = []

    def begin(self: TorchRunner, context_tokens: int, bounds: InvariantRange | None = None) -> None:
        self.context_tokens = context_tokens
        self.mode = Mode(True, False, bounds, backend=Graphs())
        starts.append(bounds)

    monkeypatch.setattr(TorchRunner, "start", begin)
    monkeypatch.setattr(TorchRunner, "in_pages", True)
    return starts


class Graphs:
    """A backend that is not called."""

    max_streams = max_rows = 256

    def __call__(self, segments: Sequence[Segment]) -> torch.Tensor:
        raise AssertionError


def test_on_a_cpu_only_the_library_has_invariant_rows(tiny_config: LlamaConfig) -> None:
    runner = runner_of(tiny_config, torch.float32)
    start(runner, CONTEXT, "auto", None)
    assert runner.invariance == "off"
    with pytest.raises(ModelError, match=r"set model\.invariant to auto, or serve a model of a family"):
        start(runner, CONTEXT, "on", None)


@pytest.mark.usefixtures("paged")
def test_auto_follows_the_cost_and_on_refuses_where_it_cannot_hold(
    tiny_config: LlamaConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = runner_of(tiny_config, torch.float32)
    monkeypatch.setattr(invariance, "holds", lambda *_: True)
    bounds = InvariantRange(2, 65)
    for finding, in_auto in (
        (ProbeResult(bounds, 0.02), bounds),
        (ProbeResult(bounds, 0.2), None),
        (ProbeResult(None, 0.0), None),
    ):
        monkeypatch.setattr(invariance, "find", lambda *_, finding=finding: finding)
        start(runner, CONTEXT, "auto", None)
        assert runner.invariant_range == in_auto
        assert runner.draft_depth(60) == (3 if in_auto else MAX_NODES)
    with pytest.raises(ModelError, match="depend on the draft's size"):
        start(runner, CONTEXT, "on", None)
    start(runner, CONTEXT, "off", None)
    assert runner.invariance == "off"


@pytest.mark.usefixtures("paged")
def test_a_finding_is_saved_and_a_damaged_file_is_measured_again(
    tiny_config: LlamaConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    runner, file = runner_of(tiny_config, torch.float32), tmp_path / "new" / "rows.json"
    calls: list[int] = []

    def counted(*_: object) -> ProbeResult:
        calls.append(1)
        return ProbeResult(InvariantRange(2, 65), 0.2)

    monkeypatch.setattr(invariance, "find", counted)
    monkeypatch.setattr(invariance, "holds", lambda *_: True)
    valid = {"version": invariance.VERSION, "bounds": {"low": 1, "high": 65}, "cost": 0}
    low_above_high = valid | {"bounds": {"low": 3, "high": 2}}
    for damage, searches in (
        (None, 1),
        (None, 1),
        (json.dumps(valid | {"version": invariance.VERSION - 1}), 2),
        (json.dumps(valid | {"bounds": {"low": 1}}), 3),
        ("[", 4),
        ("[]", 5),
        (json.dumps(low_above_high), 6),
    ):
        if damage:
            file.write_text(damage)
        start(runner, CONTEXT, "on", file)
        assert runner.invariance == "on, 2 to 65 rows, costs 20.0% of a step"
        assert len(calls) == searches


def test_a_first_start_compiles_once_where_rows_are_invariant(
    tiny_config: LlamaConfig, paged: list[InvariantRange | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = runner_of(tiny_config, torch.float32)
    monkeypatch.setattr(invariance, "holds", lambda *_: True)
    start(runner, CONTEXT, "auto", None)
    assert paged == [invariance.RANGES[0]]


@pytest.mark.parametrize(("invariant", "chosen"), [("auto", None), ("on", invariance.RANGES[-1])])
def test_a_range_that_costs_something_is_started_once_with_it_and_once_without(
    tiny_config: LlamaConfig,
    paged: list[InvariantRange | None],
    invariant: Invariant,
    chosen: InvariantRange | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = runner_of(tiny_config, torch.float32)
    monkeypatch.setattr(invariance, "holds", lambda runner, _: runner.invariant_range == invariance.RANGES[-1])
    monkeypatch.setattr(invariance, "cost", lambda *_: 0.2)
    start(runner, CONTEXT, invariant, None)
    assert paged == [*invariance.RANGES, None]
    assert runner.invariant_range == chosen


def test_a_saved_range_that_does_not_hold_any_more_is_searched_again(
    tiny_config: LlamaConfig,
    paged: list[InvariantRange | None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    runner, file = runner_of(tiny_config, torch.float32), tmp_path / "rows.json"
    monkeypatch.setattr(invariance, "holds", lambda runner, _: runner.invariant_range != InvariantRange(1, 256))
    for saved, starts in (
        ({"version": invariance.VERSION, "bounds": {"low": 1, "high": 256}, "cost": 0}, 2),
        (None, 3),  # the next start
    ):
        if saved:
            file.write_text(json.dumps(saved))
        start(runner, CONTEXT, "on", file)
        assert runner.invariant_range == invariance.RANGES[0]
        assert len(paged) == starts
    assert [message for message in caplog.messages if "searched again" in message]


def test_compared_trees_and_their_paths_have_every_number_of_rows_of_graphs() -> None:
    counts = [count for count in ROWS if count >= invariance.FEW_ROWS]
    rows = {tree.nodes + 1 + tree.beside for tree in invariance.TREES} | {1, 1 + invariance.TREES[0].beside}
    assert {next(count for count in counts if count >= each) for each in rows} == {*counts}
