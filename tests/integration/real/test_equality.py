"""Drafted answers of the real model equal plain decoding's, and plain decoding equals transformers' `generate`."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.drafters.options import NAMES, NEED_A_MODEL
from outrider.models import packaged
from outrider.verify.tokenizer import load_tokenizer
from tests.integration.real.questions import CAPITAL, NODES, QUESTIONS, SAMPLING, TOKENS, Comparison, budgets, chat, text
from tests.requests import complete
from tests.servers import Served, serving

TABLES = [name for name in NAMES if name not in (*NEED_A_MODEL, "none")]
SAMPLED = pytest.mark.parametrize("sampling", SAMPLING)


@pytest.fixture(scope="module")
def comparison(real: Served) -> Comparison:
    return Comparison(real)


@SAMPLED
def test_the_default_drafter_changes_no_answer(comparison: Comparison, sampling: str) -> None:
    comparison.check(QUESTIONS[0], sampling, "fusion", {})
    assert comparison.check(QUESTIONS[0], sampling, "fusion", {"max_nodes": NODES}) > 0


@pytest.mark.slow
@SAMPLED
@pytest.mark.parametrize("drafter", TABLES)
def test_no_drafter_changes_an_answer(comparison: Comparison, drafter: str, sampling: str) -> None:
    predicted: dict[str, Any] = {}
    if drafter == "prediction":
        content = text(chat(comparison.server, QUESTIONS[1], max_tokens=30))
        predicted["prediction"] = {"type": "content", "content": content}
    accepted = [
        comparison.check(question, sampling, drafter, budget, **predicted)
        for question, budget in zip((*QUESTIONS, CAPITAL), budgets(), strict=False)
    ]
    assert sum(accepted) > 0 or (drafter, sampling) == ("lookahead", "sampled")


@pytest.fixture(scope="module")
def drafting(file: str) -> Iterator[Comparison]:
    """A server whose draft model is the target in 4 bits, which is several times as fast and nearly always right."""
    with serving("--model", packaged.SMOLLM2, "--model.dtype", "float32", "--draft-model", file) as server:
        yield Comparison(server)


@pytest.mark.slow
@SAMPLED
@pytest.mark.parametrize("drafter", [*NEED_A_MODEL, "fusion"])
def test_no_draft_model_changes_an_answer(drafting: Comparison, drafter: str, sampling: str) -> None:
    """Measured times decide how much is drafted."""
    for question, budget in zip(QUESTIONS[:2], budgets(), strict=False):
        drafted, _ = drafting.answer(question, sampling, {"drafter": drafter, **budget}, {})
        assert drafted == drafting.plain(question, sampling)


@pytest.fixture(scope="module")
def in_float32(file: str) -> Iterator[Served]:
    with serving("--model", packaged.SMOLLM2, "--model.dtype", "float32") as server:
        yield server


@pytest.mark.slow
def test_plain_decoding_is_that_of_transformers(in_float32: Served, file: str) -> None:
    folder, name = os.path.split(file)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    tokenizer = load_tokenizer(file)
    for question in (CAPITAL, *QUESTIONS):
        messages = [{"role": "user", "content": question}]
        prompt = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        ids = tokenizer.encode(prompt)
        with torch.inference_mode():
            expected = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=TOKENS)[0, len(ids) :].tolist()
        fields: dict[str, Any] = {"prompt": ids, "max_tokens": TOKENS, "return_token_ids": True}
        found = complete(in_float32, **fields, speculation={"drafter": "none"})["choices"][0]["token_ids"]
        assert found == expected
        assert tokenizer.decode(found, skip_special_tokens=True) == text(chat(in_float32, question, max_tokens=TOKENS))
