"""transformers' options of `generate`, and its greedy answers, which are those of Outrider."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from bench.decode import answer, encode
from bench.live.hugging_face import METHODS, TransformersChat
from bench.live.run import make_setup
from bench.live.setup import Choice, Question
from bench.plan import Plan
from outrider.server.settings import Settings
from outrider.server.worker.runtime import load

CHOICE = Choice(Path("q.jsonl"), 1, ["none"], [0.0], 24, ["transformers"], "")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_greedy_answers_are_outriders(exact: Settings, tmp_path: Path) -> None:
    runtime = load(exact)
    prompt = encode(runtime, "def read_file(path):\n")
    expected = answer(runtime, exact, "fusion", prompt, 0.0, Plan([], [], [], 24, 1)).tokens
    flags = ["--model.threads", "1", "--model.dtype", "float32"]
    with ExitStack() as stack:
        peer = TransformersChat(make_setup(None, flags, CHOICE, tmp_path), stack)
        for method in METHODS:
            assert peer.answer(method, Question("", prompt, 0.0, 24)).ids == expected
