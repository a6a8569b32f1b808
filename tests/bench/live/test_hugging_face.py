"""transformers' options of `generate`, and its greedy answers, which are those of Outrider."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from bench.decode import answer, encode
from bench.live.hugging_face import METHODS, TransformersChat
from bench.live.run import make_setup
from bench.live.setup import Choice, Question
from bench.plan import Plan
from outrider.server.settings import Settings
from outrider.server.worker.runtime import load

CHOICE = Choice(Path("q.jsonl"), 1, ["none"], [0.0], 24, ["transformers"], "")


class FakeModel:
    """Appends token 7 until `max_new_tokens`, and keeps the options."""

    generation_config = SimpleNamespace(eos_token_id=2)

    def eval(self) -> FakeModel:
        return self

    def generate(self, ids: torch.Tensor, streamer: Any, **options: Any) -> torch.Tensor:
        self.options = options
        for _ in range(1 + options["max_new_tokens"]):
            streamer.put(None)
        return torch.cat([ids, torch.full((1, options["max_new_tokens"]), 7)], 1)


def test_options_of_generate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module, model = "bench.live.hugging_face", FakeModel()
    monkeypatch.setattr(f"{module}.AutoModelForCausalLM", SimpleNamespace(from_pretrained=lambda *_, **__: model))
    monkeypatch.setattr(f"{module}.load_tokenizer", lambda path: SimpleNamespace(eos_token_id=3))
    with ExitStack() as stack:
        peer = TransformersChat(make_setup(None, ["--model.threads", "1"], CHOICE, tmp_path), stack)
        found = peer.answer("lookup", Question("x", np.array([1, 2], np.int32), 0.5, 3, seed=1))
        assert (found.tokens, found.ids, found.steps) == (3, [7, 7, 7], 3)
        assert found.first_token_seconds is not None and 0 < found.first_token_seconds <= found.seconds
        assert (model.options["do_sample"], model.options["temperature"]) == (True, 0.5)
        assert (model.options["eos_token_id"], model.options["prompt_lookup_num_tokens"]) == ([2, 3], 10)
        peer.answer("plain", Question("x", np.array([1], np.int32), 0.0, 3))
        assert not model.options["do_sample"] and "prompt_lookup_num_tokens" not in model.options


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
