"""POST /infill over HTTP: prompts, sessions, streams, and models that cannot fill in."""

from typing import Any, cast

import httpx
import pytest
from fastapi import FastAPI

from outrider import models
from outrider.server.app import create_app
from outrider.server.engine.engine import Engine, EngineError
from outrider.server.settings import load_settings
from outrider.verify.tokenizer import load_tokenizer
from tests.server.fakes import FakeEngine, events, fetch

MARKERS = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>", "<|fim_pad|>"]
TOKENIZER = load_tokenizer(str(models.TARGET))
TOKENIZER.backend_tokenizer.add_special_tokens(MARKERS)
BODY = {"input_prefix": "def f(", "input_suffix": "):\n"}


def app_of(engine: FakeEngine) -> FastAPI:
    """An application whose tokenizer has markers."""
    return create_app(load_settings(), TOKENIZER, new_engine=lambda *_: cast(Engine, engine))


def post(engine: FakeEngine, fields: dict[str, Any], path: str = "/infill", **options: Any) -> httpx.Response:
    """Sends a request to such an application."""
    return fetch(app_of(engine), "POST", path, fields, **options)


def prompt_of(engine: FakeEngine) -> str:
    return str(TOKENIZER.decode(engine.requests[0].prompt))


def test_an_editors_request() -> None:
    engine = FakeEngine("x", ", y")
    files = [{"filename": "a.py", "text": "A = 1\n"}]
    fields = {"prompt": "z", "n_predict": 6, "temperature": 0.0, "stop": ["\n"], "samplers": ["temperature"]}
    answer = post(engine, {**BODY, **fields, "input_extra": files}).json()
    assert (answer["content"], answer["stop"], answer["model"]) == ("x, y", True, models.NAME)
    assert answer["tokens_evaluated"] == len(engine.requests[0].prompt)
    assert answer["timings"]["cache_n"] == 2
    assert prompt_of(engine) == (
        "<|repo_name|>myproject\n<|file_sep|>a.py\nA = 1\n<|file_sep|>filename\n"
        "<|fim_prefix|>def f(z<|fim_suffix|>):\n<|fim_middle|>"
    )
    request = engine.requests[0]
    assert (request.max_tokens, request.stop, request.params.temperature) == (6, ("\n",), 0.0)
    assert set(request.stop_token_ids) == set(map(TOKENIZER.backend_tokenizer.token_to_id, MARKERS))


CURSORS = {
    "Python": ("def area(radius):\n", "    return 3.14 * ra"),
    "Python's first indentation": ("def f(n):\n", "    "),
    "Java's brace": ("class A {", ""),
    "C with a tab": ("int main(void) {\n", "\t"),
    "Go's return": ("func f() int {\n", "\treturn "),
}


def test_the_line_with_the_cursor_is_the_end_of_the_prefix() -> None:
    engine = FakeEngine("x")
    app = app_of(engine)
    for cursor, (before, line) in CURSORS.items():
        fetch(app, "POST", "/infill", {"input_prefix": before, "prompt": line, "input_suffix": "\n}\n"})
        fetch(app, "POST", "/infill", {"input_prefix": before + line, "input_suffix": "\n}\n"})
        separate, joined = (request.prompt for request in engine.requests[-2:])
        assert separate == joined, cursor
        assert TOKENIZER.decode(separate) == f"<|fim_prefix|>{before}{line}<|fim_suffix|>\n}}\n<|fim_middle|>", cursor


def test_a_stream() -> None:
    *chunks, last = events(post(FakeEngine("x", None, "y"), {**BODY, "stream": True}))
    texts = [chunk["content"] for chunk in chunks if isinstance(chunk, dict)]
    assert texts == ["x", "y"] and not any(chunk["stop"] for chunk in chunks if isinstance(chunk, dict))
    assert (last["content"], last["stop"], last["tokens_predicted"]) == ("", True, 3)


@pytest.mark.parametrize("stream", [False, True])
def test_the_answer_ends_at_a_line_of_less_indentation(stream: bool) -> None:
    engine = FakeEngine("x):\n   ", " a\n    b", "\n\n", "c", error=EngineError("not reached"))
    response = post(engine, {**BODY, "n_indent": 4, "stream": stream})
    answers = events(response) if stream else [response.json()]
    assert "".join(answer["content"] for answer in answers) == "x):\n    a\n    b\n"
    assert (answers[-1]["stop"], answers[-1]["stop_type"]) == (True, "limit")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input_extra": [{"filename": "a"}]}, "input_extra.0.text"),
        ({"input_prefix": "x" * 400_000}, "prompt"),
        ({"input_extra": [{"text": "x" * 100_000}] * 4}, "input_extra"),
    ],
)
def test_invalid_requests_are_named(fields: dict[str, Any], param: str) -> None:
    response = post(FakeEngine("x"), {**BODY, **fields})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert param in (error["param"] or error["message"])


def test_the_suffix_of_a_completion_fills_in_and_ends_at_markers() -> None:
    engine = FakeEngine("x")
    answer = post(engine, {"prompt": "def f(", "suffix": "):\n", "stop_token_ids": [5]}, "/v1/completions").json()
    assert answer["choices"][0]["text"] == "x"
    assert prompt_of(engine) == "<|fim_prefix|>def f(<|fim_suffix|>):\n<|fim_middle|>"
    assert set(engine.requests[0].stop_token_ids) == {5, *map(TOKENIZER.backend_tokenizer.token_to_id, MARKERS)}


def test_a_prompt_with_markers_of_the_clients_ends_at_markers() -> None:
    engine = FakeEngine("x")
    app = app_of(engine)
    asks = "<|fim_prefix|>def f(<|fim_suffix|>):\n<|fim_middle|>"
    stops = set(map(TOKENIZER.backend_tokenizer.token_to_id, MARKERS))
    for prompt in (asks, TOKENIZER.encode(asks), [asks, "def f("], "def f(", "<|fim_prefix|>def f(<|fim_suffix|>"):
        assert fetch(app, "POST", "/v1/completions", {"prompt": prompt, "stop_token_ids": [5]}).status_code == 200
    found = [set(request.stop_token_ids) for request in engine.requests]
    assert found == [{5, *stops}, {5, *stops}, {5, *stops}, {5}, {5}, {5}]
