"""The decoding benchmark on the embedded model: drafts change no token, divergences are found, figures are computed right."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.decode import results, run
from bench.plan import BenchError, Plan
from bench.record import Record
from outrider.server.settings import Settings

PROMPT = "def read_file(path):\n"


@pytest.mark.slow
def test_drafts_save_steps_and_change_no_token(exact: Settings, tmp_path: Path, printed: Callable[[], str]) -> None:
    plan = Plan(["none", "fusion"], [PROMPT], [0.0], 24, 1)
    speculation = exact.speculation.model_copy(update={"max_nodes": 8})  # `auto` drafts only where measured times say so
    figures = run(exact.model_copy(update={"speculation": speculation}), plan, tmp_path / "r.json")
    rows = {row["drafter"]: row for row in figures["results"]}
    assert set(rows) == {"none", "fusion"}
    assert {row["same_tokens_as_first"] for row in rows.values()} == {"1/1"}
    assert rows["fusion"]["tokens_per_step"] > rows["none"]["tokens_per_step"] == 1.0
    assert json.loads((tmp_path / "r.json").read_text())["results"] == figures["results"]
    assert "fusion" in printed()


def test_figures_are_medians_and_means() -> None:
    seconds = {"draft_seconds": 0.1, "verify_seconds": 0.5, "commit_seconds": 0.01}
    row = {"prompt": 0, "temperature": 0.0, "drafter": "none", "tokens": 30, "steps": 10, "text": "same"} | seconds
    (figures,) = results([{**row, "repeat": repeat, "seconds": took} for repeat, took in enumerate((3.0, 1.0, 1.5))])
    assert figures["tokens_per_second"] == 20.0
    assert figures["tokens_per_step"] == 3.0
    assert (figures["draft_ms_per_step"], figures["verify_ms_per_step"], figures["commit_ms_per_step"]) == (10.0, 50.0, 1.0)


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text("{}")
    with pytest.raises(BenchError, match=r"r\.json has no answers to go on with; give another file by --out"):
        Record(tmp_path / "r.json", {}, ["prompt"])
