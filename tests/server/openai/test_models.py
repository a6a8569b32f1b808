"""The served model's card, and its tokenizer."""

from __future__ import annotations

from typing import Any

import pytest

import models
from tests.server.fakes import CONTEXT_TOKENS, TOKENIZER, FakeEngine, app_with, fetch

APP = app_with(FakeEngine())


def test_the_model_card() -> None:
    (card,) = fetch(APP, "GET", "/v1/models").json()["data"]
    assert (card["id"], card["object"], card["owned_by"]) == (models.NAME, "model", "outrider")
    assert fetch(APP, "GET", f"/v1/models/{models.NAME}").json() == card
    missing = fetch(APP, "GET", "/v1/models/other/name")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


def test_tokenize_and_detokenize_round_trip() -> None:
    found = fetch(APP, "POST", "/tokenize", {"prompt": "def f():"}).json()
    assert found == {"tokens": TOKENIZER.encode("def f():"), "count": found["count"], "max_model_len": CONTEXT_TOKENS}
    assert found["count"] == len(found["tokens"])
    assert fetch(APP, "POST", "/detokenize", {"tokens": found["tokens"]}).json() == {"prompt": "def f():"}


def test_messages_are_rendered() -> None:
    messages = [{"role": "user", "content": "Hello"}]
    tokens = fetch(APP, "POST", "/tokenize", {"messages": messages}).json()["tokens"]
    rendered = TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert TOKENIZER.decode(tokens) == rendered


@pytest.mark.parametrize("body", [{}, {"prompt": "x", "messages": [{"role": "user", "content": "y"}]}])
def test_tokenize_needs_either_prompt_or_messages(body: dict[str, Any]) -> None:
    response = fetch(APP, "POST", "/tokenize", body)
    assert response.status_code == 400 and "either 'prompt' or 'messages'" in response.json()["error"]["message"]
