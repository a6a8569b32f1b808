"""The contenders of each number of bits answer all prompts."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
from rich.progress import Progress

from bench.peers import answers
from bench.peers.answers import Choice, make_weights, measure
from bench.peers.levels import Levels
from bench.peers.peer import Answer, Peer, Question, Weights
from bench.plan import BenchError, Plan


class Echo(Peer):
    """Answers with the prompt; has 8 and 4 bits only."""

    name, transport, bits = "echo", "in process", (8, 4)
    closed: list[int] = []  # noqa: RUF012

    def __init__(self, weights: Weights, stack: ExitStack) -> None:
        self.methods = ("plain", "twice")
        stack.callback(self.closed.append, weights.bits)

    def answer(self, method: str, question: Question) -> Answer:
        tokens = question.ids.tolist() * (2 if method == "twice" else 1)
        return Answer(len(tokens), 0.5, tokens)


class Other(Echo):
    """Has 16 and 8 bits."""

    name, bits = "other", (16, 8)


def choice(bits: list[int]) -> Choice:
    return Choice(Plan(["none"], ["def f(x):", "import os"], [0.0, 0.8], 16, 1), bits, ["echo", "other"])


def test_peers_take_part_in_the_bits_that_they_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "PEERS", {"echo": Echo, "other": Other})
    with Progress(disable=True) as progress:
        rows = measure(choice([16, 8, 4]), Levels(None, [], 1), tmp_path, progress)
        assert progress.finished
    assert Echo.closed == [16, 8, 8, 4]
    found = [(row["bits"], row["peer"]) for row in rows if row["temperature"] == 0.8 and row["method"] == "plain"]
    assert found == [(16, "other"), (8, "echo"), (8, "other"), (4, "echo")]
    assert {row["same_tokens_as_first"] for row in rows if row["method"] == "twice"} == {"0/2"}


def test_only_folders_are_converted(tmp_path: Path) -> None:
    weights = make_weights(choice([8]), Levels(None, [], 1), 8, tmp_path)
    assert (weights.context_tokens, weights.settings.model.quantize, weights.path) == (2048, "int8", str(weights.path))
    hub = Weights(8, Levels(None, ["--model.path", "owner/model"], 1).settings(8), [], 1, 64, tmp_path, ["none"], None)
    with pytest.raises(BenchError, match=r"leave out llama\.cpp with --peer"):
        _ = hub.gguf
