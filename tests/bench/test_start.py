"""Starts are measured and saved: the later one maps what the first one has written, and answers the same."""

import json
from pathlib import Path

import pytest

from bench.plan import BenchError
from bench.start import run
from tests.hub import installed


def test_a_file_that_is_missing_is_reported(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"there is no file .*no\.gguf"):
        run([tmp_path / "no.gguf"], 1, [], None)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_starts_are_measured_and_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = installed()
    run([file], 1, ["--model.packed_folder", str(tmp_path / "packed")], tmp_path / "start.json")
    (found,) = json.loads((tmp_path / "start.json").read_text())["files"].values()
    first, later = found["first"][0], found["later"][0]
    assert first["text"] == later["text"]
    assert not [*(tmp_path / "packed").iterdir()]
    # Weights are pages of a file from the first start on.
    worker = 1
    assert max(first["private_mb"][worker], later["private_mb"][worker]) < found["file_mb"] < first["peak_mb"][worker]
    printed = capsys.readouterr().out
    assert "first" in printed and "later" in printed
    assert max(map(len, printed.splitlines())) <= 80
