"""The served model's card, and its tokenizer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from outrider import models
from outrider.server.http.errors import APIError
from outrider.server.openai.models import MAX_NAME_CHARACTERS, ModelNames
from outrider.server.settings import Model
from tests.server.fakes import CONTEXT_TOKENS, TOKENIZER, FakeEngine, app_with, fetch

APP = app_with(FakeEngine())


def test_the_model_card() -> None:
    (card,) = fetch(APP, "GET", "/v1/models").json()["data"]
    assert (card["id"], card["object"], card["owned_by"]) == (models.NAME, "model", "outrider")
    assert fetch(APP, "GET", f"/v1/models/{models.NAME}").json() == card
    missing = fetch(APP, "GET", "/v1/models/other/name")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


def test_the_model_card_says_what_the_model_can_do() -> None:
    engine = FakeEngine()
    (loading,) = fetch(app_with(engine), "GET", "/v1/models").json()["data"]
    assert loading["max_model_len"] is None
    engine.info = asyncio.run(engine.wait_started())
    (card,) = fetch(app_with(engine), "GET", "/v1/models").json()["data"]
    assert card["max_model_len"] == card["context_length"] == card["meta"]["n_ctx"] == CONTEXT_TOKENS
    assert card["capabilities"] == ["chat", "tools", "structured_outputs"]


def test_codex_finds_the_catalog_that_it_expects() -> None:
    found = fetch(APP, "GET", "/v1/models?client_version=0.169.0").json()
    assert found["models"] == [] and found["data"][0]["id"] == models.NAME
    assert "models" not in fetch(APP, "GET", "/v1/models").json()


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


def test_aliases_are_accepted_and_echoed() -> None:
    app = app_with(FakeEngine("a"), model__aliases=["gpt-4o", "claude-*"])
    assert [card["id"] for card in fetch(app, "GET", "/v1/models").json()["data"]] == [models.NAME, "gpt-4o"]
    for name in ("gpt-4o", "claude-opus-4", models.NAME):
        assert fetch(app, "GET", f"/v1/models/{name}").json()["id"] == name
        for path, fields in (
            ("/v1/completions", {"prompt": "x"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
            ("/v1/responses", {"input": "x"}),
        ):
            assert fetch(app, "POST", path, {**fields, "model": name}).json()["model"] == name
    for name in ("gpt-4o-mini", "my-claude-x", "Claude-opus"):
        assert fetch(app, "POST", "/v1/completions", {"prompt": "x", "model": name}).status_code == 404
        assert fetch(app, "GET", f"/v1/models/{name}").status_code == 404


def test_an_echoed_name_is_short() -> None:
    names = ModelNames(Model(name="m", aliases=("*",)))
    names.check("x" * MAX_NAME_CHARACTERS)
    with pytest.raises(APIError) as raised:
        names.check("x" * (MAX_NAME_CHARACTERS + 1))
    assert raised.value.status_code == 404 and len(raised.value.message) < 1000
