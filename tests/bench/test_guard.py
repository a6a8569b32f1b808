"""What became slower is named, and what cannot be compared is refused."""

from pathlib import Path
from zipfile import ZipFile

import pytest

from bench import guard
from bench.http.chat import Answer
from bench.pair.run import Part
from bench.plan import BenchError


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
        return Answer(11, seconds + 1, steps, first_token_seconds=1.0, text="text", first_text="")

    fast, slow = answer(1, 5), answer(2, 10)
    answers = [[slow, fast, fast, slow]]
    monkeypatch.setattr(guard, "measure", lambda *_: [Part(task, 0, 0.0, answers) for task in ("chat", "rag")])
    found = dict(guard.measured([]))
    ratios = {name: ours / theirs for name, (ours, theirs) in found.items()}
    expected = {"plain steps": 0.5, "fusion, chat": 2, "steps per token, chat": 2, "first token": 1, "prompt": 1}
    assert ratios == pytest.approx(expected)


def test_a_slowdown_counts_if_most_pairs_have_it() -> None:
    assert guard.slowdowns({"a": [1.05, 1.04, 1.2], "b": [0.9, 0.9, 1.05, 1.05, 1.05], "c": [1.02, 1.02]}) == ["a"]
