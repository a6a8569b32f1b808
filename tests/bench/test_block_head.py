"""The training of a block head: its progress, going on after a stop, and the head that it saves."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench.block_head import Recipe, run
from outrider import models
from outrider.verify.heads.block_model import BlockModel
from outrider.verify.heads.loading import load_head
from outrider.verify.model.backend import load
from outrider.verify.model.load_options import LoadOptions


def test_a_head_is_trained_and_goes_on_where_it_was_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"def f{number}(x):\n"}) + "\n" for number in range(4)))
    recipe = Recipe(str(models.TARGET), [prompts], tmp_path / "head", 2, 24, 4, 3, 1)
    run(replace(recipe, epochs=2))
    first = capsys.readouterr().out
    assert "4 of 4 answers" in first
    assert "4 of 4 texts" in first
    run(recipe)
    then = capsys.readouterr().out
    assert "of 4 answers" not in then
    assert "8 of 8 texts" in then
    losses = [float(text.split("loss ")[1].split(",")[0]) for text in (first, then)]
    assert losses[1] < losses[0]
    target = load(LoadOptions(str(models.TARGET), device="cpu"))
    head = load_head(str(tmp_path / "head"), target)
    assert isinstance(head, BlockModel) and head.block.shape.drafted == 3
