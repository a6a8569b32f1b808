"""Drafted answers of the real model equal plain decoding's, and plain decoding equals transformers' `generate`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.drafters.options import NAMES, NEED_A_MODEL
from outrider.models import smollm2
from outrider.verify.tokenizer import load_tokenizer
from tests.integration.real.conftest import FLAGS
from tests.integration.real.questions import CAPITAL, QUESTIONS, SAMPLING, chat, text
from tests.requests import complete
from tests.servers import Served, serving

TABLES = [name for name in NAMES if name not in (*NEED_A_MODEL, "none")]
TOKENS = 48
SAMPLED = pytest.mark.parametrize("sampling", SAMPLING)


def answer(server: Served, drafter: str, content: str, sampling: str, **fields: Any) -> tuple[list[int], dict[str, Any]]:
    """The token ids of an answer, and the report on its drafts."""
    asked = {**SAMPLING[sampling], "max_tokens": TOKENS, "return_token_ids": True, **fields}
    found = chat(server, content, **asked, speculation={"drafter": drafter, "report": True})
    return found["choices"][0]["token_ids"], found["speculation"]


def check(server: Served, drafter: str, content: str, sampling: str, **fields: Any) -> int:
    """Compares drafted with plain decoding; returns the number of accepted tokens."""
    plain, report = answer(server, "none", content, sampling)
    assert report["steps"] == len(plain) > 3
    drafted, report = answer(server, drafter, content, sampling, **fields)
    assert drafted == plain
    accepted = int(sum(report["accepted_tokens"].values()))
    # Each step adds a bonus token, except the last one if a drafted token ends the answer.
    assert accepted - (len(drafted) - report["steps"]) in (0, 1)
    return accepted


@SAMPLED
def test_the_default_drafter_changes_no_answer(real: Served, sampling: str) -> None:
    assert check(real, "fusion", QUESTIONS[0], sampling) > 0


@pytest.mark.slow
@SAMPLED
@pytest.mark.parametrize("drafter", TABLES)
def test_no_drafter_changes_an_answer(real: Served, drafter: str, sampling: str) -> None:
    predicted: dict[str, Any] = {}
    if drafter == "prediction":
        predicted["prediction"] = {"type": "content", "content": text(chat(real, QUESTIONS[1], max_tokens=30))}
    accepted = [check(real, drafter, question, sampling, **predicted) for question in (*QUESTIONS, CAPITAL)]
    assert sum(accepted) > 0 or (drafter, sampling) == ("lookahead", "sampled")


@pytest.fixture(scope="module")
def drafting(file: str) -> Iterator[Served]:
    """A server whose draft model is the target itself, so that nearly every greedy draft is accepted."""
    with serving("--model", smollm2.NAME, *FLAGS, "--draft-model", file, "--draft_model.dtype", "float32") as server:
        yield server


@pytest.mark.slow
@SAMPLED
@pytest.mark.parametrize("drafter", NEED_A_MODEL)
def test_no_draft_model_changes_an_answer(drafting: Served, drafter: str, sampling: str) -> None:
    assert check(drafting, drafter, QUESTIONS[0], sampling) >= (TOKENS // 4 if sampling == "greedy" else 0)


@pytest.mark.slow
def test_plain_decoding_is_that_of_transformers(real: Served, file: str) -> None:
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
        found = complete(real, **fields, speculation={"drafter": "none"})["choices"][0]["token_ids"]
        assert found == expected
        assert tokenizer.decode(found, skip_special_tokens=True) == text(chat(real, question, max_tokens=TOKENS))
