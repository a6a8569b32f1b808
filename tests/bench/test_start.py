"""Starts are measured and saved; what became slower is named, and what cannot be compared is refused."""

import json
from pathlib import Path
from zipfile import ZipFile

import pytest

from bench import guard
from bench.http.chat import Answer
from bench.pair.run import Part
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


def test_a_wheel_is_unpacked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "ROOT", tmp_path)
    wheel = tmp_path / "outrider-1.0-py3-none-any.whl"
    with ZipFile(wheel, "w") as archive:
        archive.writestr("outrider/server/cli.py", "")
    packages = guard.packages(str(wheel))
    assert (packages / "outrider/server/cli.py").is_file()
    wheel.unlink()
    assert guard.packages(str(wheel)) == packages


def test_an_unknown_commit_is_refused() -> None:
    with pytest.raises(BenchError, match="There is no commit no-such-commit"):
        guard.packages("no-such-commit")


def test_pairs_are_times_of_this_checkout_and_the_earlier_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(seconds: float, steps: int) -> Answer:
        return Answer(11, seconds + 1, None, steps, first_token_seconds=1.0, text="text", first_text="")

    fast, slow = answer(1, 5), answer(2, 10)
    answers = [[slow, fast, fast, slow]]
    monkeypatch.setattr(guard, "measure", lambda *_: [Part(task, 0, 0.0, answers) for task in ("chat", "rag")])
    found = dict(guard.measured([]))
    ratios = {name: ours / theirs for name, (ours, theirs) in found.items()}
    expected = {"plain steps": 0.5, "fusion, chat": 2, "steps per token, chat": 2, "first token": 1, "prompt": 1}
    assert ratios == pytest.approx(expected)


def test_a_slowdown_counts_if_most_pairs_have_it() -> None:
    assert guard.slowdowns({"a": [1.05, 1.04, 1.2], "b": [0.9, 0.9, 1.05, 1.05, 1.05], "c": [1.02, 1.02]}) == ["a"]
