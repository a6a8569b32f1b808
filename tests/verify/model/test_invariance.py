"""Invariant rows: what a start finds out, saves, and refuses."""

import copy
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.drafters.interface import MAX_NODES
from outrider.verify.errors import ModelError
from outrider.verify.model import invariance
from outrider.verify.model.gpu.text_work import INVARIANT_ROWS
from outrider.verify.model.invariance import Tree, start
from outrider.verify.model.torch_runner import TorchRunner

CONTEXT = 512


@pytest.fixture
def runner(tiny_config: LlamaConfig) -> TorchRunner:
    config = copy.deepcopy(tiny_config)
    config.max_position_embeddings = CONTEXT
    return TorchRunner(LlamaForCausalLM(config), CONTEXT, pack=True, started=False)


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Runners are as on a GPU, but start without kernels; returns whether each start has invariant rows."""
    found: list[bool] = []

    def begin(self: TorchRunner, context_tokens: int, invariant_rows: Sequence[int] = ()) -> None:
        self.context_tokens, self.is_invariant = context_tokens, bool(invariant_rows)
        found.append(self.is_invariant)

    monkeypatch.setattr(TorchRunner, "start", begin)
    monkeypatch.setattr(TorchRunner, "in_pages", True)
    return found


def test_on_a_cpu_only_the_library_has_invariant_rows(runner: TorchRunner) -> None:
    start(runner, CONTEXT, "auto", None)
    assert runner.invariance == "off"
    with pytest.raises(ModelError, match=r"set model\.invariant to auto, or serve a model of a family"):
        start(runner, CONTEXT, "on", None)


@pytest.mark.parametrize("holds", [True, False])
def test_rows_are_invariant_where_the_kernels_can(
    runner: TorchRunner, starts: list[bool], holds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(invariance, "holds", lambda *_: holds)
    start(runner, CONTEXT, "auto", None)
    assert starts == ([True] if holds else [True, False])
    assert runner.invariance == ("on" if holds else "impossible with this machine's kernels")
    assert runner.draft_depth(60) == (3 if holds else MAX_NODES)
    start(runner, CONTEXT, "off", None)
    assert (runner.invariance, starts[-1]) == ("off", False)
    if not holds:
        with pytest.raises(ModelError, match="depend on the draft's size"):
            start(runner, CONTEXT, "on", None)


@pytest.mark.usefixtures("starts")
def test_a_finding_is_saved_and_a_damaged_file_is_replaced(
    runner: TorchRunner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file, compared = tmp_path / "new" / "rows.json", list[int]()

    def holds(_: TorchRunner, trees: Sequence[Tree]) -> bool:
        compared.append(len(trees))
        return True

    monkeypatch.setattr(invariance, "holds", holds)
    of_other_code = json.dumps({"version": invariance.VERSION - 1, "holds": True})
    for damage in (None, None, of_other_code, json.dumps({"version": invariance.VERSION}), "[", "[]"):
        if damage:
            file.write_text(damage)
        start(runner, CONTEXT, "on", file)
    assert compared == [len(invariance.TREES), 1, *[len(invariance.TREES)] * 4]


def test_rows_that_are_not_invariant_any_more_are_not_tried_again(
    runner: TorchRunner, starts: list[bool], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "rows.json"
    for holds in (True, False, True):
        monkeypatch.setattr(invariance, "holds", lambda *_, holds=holds: holds)
        start(runner, CONTEXT, "auto", file)
    assert starts == [True, True, False, False]


def test_compared_trees_and_their_paths_have_every_number_of_rows_of_graphs() -> None:
    rows = {tree.nodes + 1 + tree.beside for tree in invariance.TREES} | {1, 1 + invariance.TREES[0].beside}
    assert {next(count for count in INVARIANT_ROWS if count >= each) for each in rows} == {*INVARIANT_ROWS}
