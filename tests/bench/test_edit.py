"""Edits are measured in all ways, and the file that is asked for differs in as many lines as it should."""

import json
from pathlib import Path

import pytest

from bench.edit import WAYS, edit, file_of, run
from bench.plan import BenchError
from outrider.server.settings import load_settings


@pytest.mark.parametrize("changes", [1, 5, 20])
def test_a_file_is_changed_in_as_many_lines_as_asked(changes: int) -> None:
    text = file_of(1000)
    assert 3800 < len(text) <= 4000
    content, wanted = edit(text, changes)
    changed = [(one, other) for one, other in zip(text.splitlines(), wanted.splitlines(), strict=True) if one != other]
    assert len(changed) == changes
    assert all(f"- Replace `{one.strip()}` by `{other.strip()}`\n" in content for one, other in changed)
    assert text in content
    with pytest.raises(BenchError, match="no 1000 lines to change"):
        edit(text, 1000)


def test_edits_are_measured_in_all_ways(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(load_settings(None, {"model.dtype": "float32"}), [200], [1], 150, out := tmp_path / "edit.json")
    rows = plain, prompt, corpus, prediction = json.loads(out.read_text())["rows"]
    assert [row["way"] for row in rows] == [*WAYS]
    assert "over_plain" not in plain and all(row["over_plain"] > 0 for row in rows[1:])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80
    assert plain["per_step"] == 1 and prediction["tokens"] == 150
    assert prediction["per_step"] >= max(prompt["per_step"], corpus["per_step"], 8)
