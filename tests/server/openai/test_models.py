"""The served model's card, its tokenizer, and its own sampling defaults, which every endpoint uses."""

import asyncio
import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from fastapi import FastAPI

from outrider import models
from outrider.server.http.errors import APIError
from outrider.server.openai.fields import NO_DEFAULTS, SamplingFields
from outrider.server.openai.models import ModelNames
from outrider.server.openai.sampling_defaults import FILE, load_sampling_defaults
from outrider.server.settings import Model
from tests.hub import MODEL, cache_models, commit_of
from tests.server.fakes import CONTEXT_TOKENS, TOKENIZER, FakeEngine, app_with, fetch
from tests.verify.model.cpu.native.files import finish

APP = app_with(FakeEngine())
MESSAGES = [{"role": "user", "content": "x"}]
MARKERS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
ENDPOINTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "x"},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 9},
    "/infill": {"input_prefix": "x", "input_suffix": "y"},
}


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
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses"):
            assert fetch(app, "POST", path, {**ENDPOINTS[path], "model": name}).json()["model"] == name
    for name in ("gpt-4o-mini", "my-claude-x", "Claude-opus"):
        assert fetch(app, "POST", "/v1/completions", {"prompt": "x", "model": name}).status_code == 404
        assert fetch(app, "GET", f"/v1/models/{name}").status_code == 404


DEFAULTS = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.25}
NAMES = tuple(DEFAULTS)
API_DEFAULTS = (1.0, 1.0, 0, 0.0, 1.0)
INFILL_DEFAULTS = (0.8, 0.95, 40, 0.05, 1.0)
NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


def model_with(folder: Path, content: str) -> str:
    """A folder that passes for a model's, with this generation_config.json."""
    (folder / "config.json").write_text("{}")
    (folder / FILE).write_text(content)
    return str(folder)


def app_for(engine: FakeEngine, path: str, **settings: Any) -> FastAPI:
    return app_with(engine, special_tokens=MARKERS, model__path=path, model__name=models.NAME, **settings)


def sampled(app: FastAPI, engine: FakeEngine, path: str, **fields: Any) -> tuple[float, ...]:
    """The sampling parameters that a request to `path` gets."""
    response = fetch(app, "POST", path, {**ENDPOINTS[path], **fields})
    assert response.status_code == 200, response.text
    return tuple(getattr(engine.requests[-1].params, name) for name in NAMES)


def test_every_endpoint_uses_the_models_defaults_unless_the_request_says_otherwise(tmp_path: Path) -> None:
    engine = FakeEngine("a")
    app = app_for(engine, model_with(tmp_path, json.dumps(DEFAULTS)))
    for path in ENDPOINTS:
        assert sampled(app, engine, path) == tuple(DEFAULTS.values()), path
        assert sampled(app, engine, path, temperature=None, top_p=None, top_k=None) == tuple(DEFAULTS.values()), path
        explicit = NEUTRAL if path != "/v1/messages" else {name: NEUTRAL[name] for name in ("temperature", "top_p", "top_k")}
        assert sampled(app, engine, path, **explicit) == tuple((DEFAULTS | explicit).values()), path
        assert sampled(app, engine, path, temperature=0) == (0, *list(DEFAULTS.values())[1:]), path
    for path in ("/v1/chat/completions", "/v1/completions", "/infill"):
        assert sampled(app, engine, path, repeat_penalty=1.0)[-1] == 1.0
        assert sampled(app, engine, path, repeat_penalty=1.0, repetition_penalty=1.5)[-1] == 1.5


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("{}", {}),
        ('{"temperature": 0, "top_k": -1, "top_p": 1}', {"temperature": 0, "top_k": -1, "top_p": 1}),
        ('{"top_k": 50, "num_beams": 4, "do_sample": true}', {"top_k": 50}),
        ('\ufeff{"top_k": 50}', {"top_k": 50}),
    ],
)
def test_what_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str, expected: dict[str, float]) -> None:
    found = load_sampling_defaults(model_with(tmp_path, content))
    assert found == SamplingFields.model_validate(expected) and not caplog.records


@pytest.mark.parametrize(
    ("content", "expected", "words"),
    [
        ("{", {}, "cannot be read"),
        ("[" * 100_000, {}, "cannot be read"),
        ('{"top_k": 20, "temperature": 2.5, "top_p": 0}', {"top_k": 20}, "temperature: Input should be less than"),
        ('{"temperature": NaN, "top_k": true, "min_p": "0.1", "top_p": 0.5}', {"top_p": 0.5}, "min_p"),
    ],
    ids=["cut short", "nested deep", "out of range", "wrong types"],
)
def test_a_broken_file_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str, expected: dict[str, float], words: str
) -> None:
    assert load_sampling_defaults(model_with(tmp_path, content)) == SamplingFields.model_validate(expected)
    [record] = caplog.records
    assert (record.levelname, record.name) == ("WARNING", "outrider") and words in record.message


def gguf_with(folder: Path, **entries: Any) -> str:
    """A GGUF file with these entries and a vocabulary."""
    writer = gguf.GGUFWriter(folder / "x.gguf", "llama")
    writer.add_token_list(["a", "b"])
    writer.add_array("x.nested", [1, 2])
    for name, value in entries.items():
        (writer.add_float32 if isinstance(value, float) else writer.add_int32)(f"general.sampling.{name}", value)
    writer.add_token_types([1, 1])
    finish(writer)
    return str(folder / "x.gguf")


GGUF_ENTRIES = {"temp": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.1, "penalty_repeat": 1.25}


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ({}, INFILL_DEFAULTS),
        (GGUF_ENTRIES, tuple(DEFAULTS.values())),
        ({"temp": 0.0}, (0.0, *INFILL_DEFAULTS[1:])),
        ({"top_k": 0, "min_p": 0.0, "xtc_probability": 0.5, "penalty_last_n": 64}, (0.8, 0.95, 0, 0.0, 1.0)),
    ],
)
def test_a_gguf_file_has_defaults_or_those_of_llama_server(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, entries: dict[str, float], expected: tuple[float, ...]
) -> None:
    caplog.set_level("INFO", "outrider")
    engine = FakeEngine("a")
    path = gguf_with(tmp_path, **entries)
    app = app_for(engine, path)
    values = dict(zip(NAMES, expected, strict=True))
    assert [record.__dict__["fields"] for record in caplog.records if "sampling" in record.message] == [values]
    for endpoint in ENDPOINTS:
        assert sampled(app, engine, endpoint) == expected, endpoint
        assert sampled(app, engine, endpoint, temperature=0)[0] == 0
    assert fetch(app, "GET", f"/v1/models/{models.NAME}").json()["default_sampling_params"] == values
    unset = app_for(engine, path, model__generation_config="none")
    for endpoint in ENDPOINTS:
        assert sampled(unset, engine, endpoint) == (INFILL_DEFAULTS if endpoint == "/infill" else API_DEFAULTS), endpoint


def test_the_file_of_a_hub_id_is_that_of_the_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = {revision: tmp_path / revision for revision in ("main", "v1")}
    for top_k, folder in enumerate(folders.values(), 20):
        folder.mkdir()
        model_with(folder, json.dumps({"top_k": top_k}))
    cache_models(monkeypatch, tmp_path / "cache", folders)
    assert load_sampling_defaults(MODEL) == SamplingFields(top_k=20)
    assert load_sampling_defaults(MODEL, commit_of("v1")) == SamplingFields(top_k=21)
    assert load_sampling_defaults("org/other") == NO_DEFAULTS
    engine = FakeEngine("a")
    assert sampled(app_for(engine, MODEL, model__revision="v1"), engine, "/v1/completions")[NAMES.index("top_k")] == 21
