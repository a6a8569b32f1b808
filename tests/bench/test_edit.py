"""Edits are measured in all ways, and the file that is asked for differs in as many lines as it should."""

import json
from pathlib import Path

import pytest

from bench.edit import WAYS, edit, file_of, run
from bench.plan import BenchError
from outrider.server.settings import Settings, load_settings
from tests.servers import Served
from tests.stand_in import answering


@pytest.mark.parametrize("changes", [1, 5, 20])
def test_a_file_is_changed_in_as_many_lines_as_asked(changes: int) -> None:
    text = file_of(1000)
    assert 3800 < len(text) <= 4000
    question, wanted = edit(text, changes)
    changed = [(one, other) for one, other in zip(text.splitlines(), wanted.splitlines(), strict=True) if one != other]
    assert len(changed) == changes
    content = question.messages[0]["content"]
    assert all(f"- Replace `{one.strip()}` by `{other.strip()}`\n" in content for one, other in changed)
    assert text in content and question.fields["prediction"]["content"] == text
    with pytest.raises(BenchError, match="no 1000 lines to change"):
        edit(text, 1000)


def test_edits_are_measured_in_all_ways(served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "edit.json"
    run(served.url, Settings(), [40], [1], 100, None, out)
    rows = json.loads(out.read_text())["rows"]
    assert all("as_asked" in row for row in rows[1:])
    assert [row["way"] for row in rows] == list(WAYS)
    assert "over_plain" not in rows[0] and all(row["over_plain"] > 0 for row in rows[1:])
    assert rows[0]["per_step"] == 1
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_a_forced_answer_is_the_file_that_is_asked_for(tmp_path: Path) -> None:
    run(None, load_settings(None, {"model.dtype": "float32"}), [200], [1], 150, None, out := tmp_path / "edit.json")
    plain, prompt, corpus, prediction = json.loads(out.read_text())["rows"]
    assert plain["per_step"] == 1 and prediction["tokens"] == 150
    assert prediction["per_step"] >= max(prompt["per_step"], corpus["per_step"], 8)


def test_a_server_without_corpora_is_refused() -> None:
    models = (200, '{"data": [{"id": "another"}]}')
    with answering({"/v1/models": models}) as other, pytest.raises(BenchError, match="takes no corpus"):
        run(other, Settings(), [40], [1], 32, None, None)
