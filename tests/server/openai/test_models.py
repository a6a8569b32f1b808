"""The served model's card, and its tokenizer."""

import asyncio
from typing import Any

import pytest

from outrider import models
from outrider.server.http.errors import APIError
from outrider.server.openai.models import ModelNames
from outrider.server.settings import Model
from tests.server.fakes import CONTEXT_TOKENS, TOKENIZER, FakeEngine, app_with, fetch

APP = app_with(FakeEngine())


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


def test_the_text_of_llama_servers_clients_has_no_special_tokens_unless_they_ask() -> None:
    def tokens(**fields: Any) -> Any:
        return fetch(APP, "POST", "/tokenize", {"content": f"{TOKENIZER.eos_token}x", **fields}).json()["tokens"]

    assert TOKENIZER.eos_token_id not in tokens() and tokens() == tokens(add_special=False)
    assert tokens(add_special=True) == TOKENIZER.encode(f"{TOKENIZER.eos_token}x")


@pytest.mark.parametrize(
    "body", [{}, {"prompt": "x", "messages": [{"role": "user", "content": "y"}]}, {"prompt": "", "content": ""}]
)
def test_tokenize_needs_one_text(body: dict[str, Any]) -> None:
    response = fetch(APP, "POST", "/tokenize", body)
    assert response.status_code == 400 and "one of 'prompt', 'messages' and 'content'" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("model", "known", "unknown"),
    [
        (Model(path="models/a.Q4_K_M.gguf"), ["a.Q4_K_M", "a.Q4_K_M.gguf"], "b.gguf"),
        (Model(path="models/a.gguf", name="b"), ["b"], "a.gguf"),
        (Model(path="owner/a"), ["a"], "a.gguf"),
    ],
)
def test_the_name_of_a_gguf_file_has_no_ending_but_requests_may_use_it(model: Model, known: list[str], unknown: str) -> None:
    names = ModelNames(model)
    assert names.listed == known[:1]
    for name in known:
        names.check(name)
    with pytest.raises(APIError):
        names.check(unknown)


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
