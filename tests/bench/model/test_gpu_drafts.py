"""Methods that draft with a model emit the synthetic answer, in fewer steps than plain decoding."""

from __future__ import annotations

import pytest

from bench.model import gpu_drafts
from bench.model.gpu_drafts import METHODS, speeds
from outrider.verify.draft_model.runner import DraftRunner
from outrider.verify.model.torch_runner import TorchRunner


def test_right_guesses_save_steps(tiny_runner: TorchRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_drafts, "REPEATS", 1)
    monkeypatch.setattr(gpu_drafts, "PROMPT_TOKENS", 4)
    draft = DraftRunner(tiny_runner, tiny_runner.vocabulary)
    draft.speed_ratio = 4.0
    figures = speeds(tiny_runner, draft, 20)
    rows = {row["drafter"]: row for row in figures["results"]}
    assert tuple(rows) == METHODS
    assert rows["none"]["tokens_per_step"] == rows["none"]["speedup"] == 1.0
    # PEARL's window follows the measured times, and both models are the same here.
    assert all(rows[name]["tokens_per_step"] > 1.0 for name in ("draft", "draft-tree", "draft-graph"))
    assert all(row["tokens_per_second"] > 0 for row in rows.values())
