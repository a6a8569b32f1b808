"""The drafts in other engines with the real model in float32, in which a row's choice does not depend on the rows beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from bench.model import gguf_file
from outrider.engines.transformers import generate
from outrider.verify.tokenizer import load_tokenizer
from tests.integration.real.questions import QUESTIONS, TOKENS

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def folder(file: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as a folder of float32 weights."""
    folder = tmp_path_factory.mktemp("engines") / "model"
    gguf_file.unpack(Path(file), folder, "float32")
    return folder


@pytest.fixture(scope="module")
def prompts(folder: Path) -> list[torch.Tensor]:
    tokenizer = load_tokenizer(str(folder))
    chats = [[{"role": "user", "content": content}] for content in QUESTIONS]
    return [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")["input_ids"] for chat in chats]


@pytest.mark.slow
def test_transformers_answers_are_plain_ones(folder: Path, prompts: list[torch.Tensor]) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    greedy = {"do_sample": False, "max_new_tokens": TOKENS}
    sampled = {"do_sample": True, "temperature": 0.8, "max_new_tokens": TOKENS, "custom_generate": generate, "seed": 3}
    for prompt in prompts:
        plain = model.generate(prompt, **greedy).tolist()
        assert model.generate(prompt, custom_generate=generate, **greedy).tolist() == plain
        drawn = model.generate(prompt, drafter="none", **sampled).tolist()
        assert model.generate(prompt, **sampled).tolist() == drawn


@pytest.mark.slow
def test_llama_cpps_answers_are_plain_ones(folder: Path, prompts: list[torch.Tensor], tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    from bench.live.llama_model import Model
    from outrider.engines.llama_cpp import DraftModel

    file = tmp_path / "model.gguf"
    gguf_file.convert(folder, file, "F32")
    with Model.opened(file, 1024, 1, None) as plain, Model.opened(file, 1024, 1, DraftModel(least=0.1)) as drafted:
        saved = 0
        for prompt in prompts:
            assert answer(drafted, prompt) == answer(plain, prompt)
            saved += plain.evaluations - drafted.evaluations
    assert saved > 0


def answer(model: Any, prompt: torch.Tensor) -> list[int]:
    model.begin()
    tokens: list[int] = []
    for token in model.generate(prompt[0].tolist(), temp=0.0, repeat_penalty=1.0):
        tokens.append(token)
        if token == model.token_eos() or len(tokens) == TOKENS:
            break
    return tokens
