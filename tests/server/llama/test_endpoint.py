"""POST /infill: prompts, sessions, streams; and llama-server's names, formats and limits."""

from typing import Any, cast

import httpx
import pytest
from fastapi import FastAPI
from pydantic import ValidationError

from outrider import models
from outrider.drafters.sequence import Finish
from outrider.server.app import create_app
from outrider.server.engine.engine import Engine, EngineError
from outrider.server.engine.messages import Request
from outrider.server.llama.endpoint import InfillFormatter
from outrider.server.llama.schema import InfillBody, LineLimits
from outrider.server.openai.generation import ChoiceOutput
from outrider.server.openai.usage import Usage
from outrider.server.settings import load_settings
from outrider.verify.sampling_params import SamplingParams
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


EOS = 9
USAGE = Usage(prompt_tokens=5, cached_tokens=3, completion_tokens=2)


def formatter(**fields: Any) -> InfillFormatter:
    body = InfillBody.model_validate({"model": "m", "input_prefix": "a", "input_suffix": "b", **fields})
    request = Request(id="r-0", prompt=[1, 2, 3, 4, 5], params=SamplingParams(), max_tokens=8)
    return InfillFormatter(body, request, arrived=0.0, stats={"first_token_ms": 12.0}, eos_ids={EOS})


def output(*tokens: int, text: str = "x\n", finish: Finish | None = "stop") -> ChoiceOutput:
    return ChoiceOutput(0, finish, list(tokens), pieces=[(text, len(tokens))])


def test_a_complete_answer() -> None:
    answer = formatter(id_slot=2).body([output(7, EOS)], USAGE)
    timings = answer.pop("timings")
    counts = {"tokens_predicted": 2, "tokens_evaluated": 5, "tokens_cached": 7, "tokens": []}
    end = {"stop": True, "stop_type": "eos", "stopping_word": "", "has_new_line": True, "truncated": False}
    assert answer == {"index": 0, "content": "x\n", "id_slot": 2, "model": "m", **counts, **end}
    assert (timings["cache_n"], timings["prompt_n"], timings["predicted_n"], timings["prompt_ms"]) == (3, 2, 2, 12.0)
    assert formatter(return_tokens=True).body([output(7, EOS)], USAGE)["tokens"] == [7, EOS]


@pytest.mark.parametrize(
    ("given", "stop", "expected"),
    [
        (output(7, EOS), ["z"], "eos"),
        (output(7), ["z"], "word"),
        (output(7), [], "eos"),  # a token that ends answers, but is not among the known ones
        (output(7, finish="length"), ["z"], "limit"),
    ],
)
def test_why_the_answer_ends(given: ChoiceOutput, stop: list[str], expected: str) -> None:
    assert formatter(stop=stop).body([given], USAGE)["stop_type"] == expected


def test_selected_fields_keep_their_paths() -> None:
    fields = ["content", "timings/prompt_n", "timings/unknown", "nothing", ""]
    assert formatter(response_fields=fields).body([output(7)], USAGE) == {"content": "x\n", "timings/prompt_n": 2}


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a:\n    b\n\t\t\t\tc", None),
        ("a\nb", "a\n"),  # the first line has any indentation
        ("a\n  b", "a\n  "),
        ("    a\n    b\n\n    c", "    a\n    b\n"),  # an empty line has none
        ("a\n      ", None),
    ],
)
def test_the_indentation(text: str, expected: str | None, size: int) -> None:
    limits, kept = LineLimits(4, 0), ""
    for start in range(0, len(text), size):
        piece = text[start : start + size]
        if cut := limits.feed(piece):
            assert cut.finish == "length" and kept + piece[: cut.characters] == expected
            return
        kept += piece
    assert expected is None


def test_after_its_time_an_answer_ends_with_the_line() -> None:
    clock = Clock()
    limits = LineLimits(0, 0.5, clock)
    assert limits.feed("a\nb\n") is None  # the time begins with the first text
    clock.now += 0.4
    assert limits.feed("c\nd") is None
    clock.now += 0.2
    assert limits.feed("e") is None
    assert limits.feed("f\ng\n") == (2, "length")


def body(**fields: Any) -> InfillBody:
    return InfillBody.model_validate({"input_prefix": "a", "input_suffix": "b", **fields})


def test_what_editors_send_is_accepted() -> None:
    fields = {"samplers": ["top_k", "top_p", "infill"], "n_indent": 4, "t_max_prompt_ms": 500, "t_max_predict_ms": 1000}
    given = body(**fields, cache_prompt=True, stop=[], stream=False, samplers_order=1)
    params = given.sampling_params()
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (1.0, 40, 0.95, 0.2)
    assert given.new_stop().feed("a\nb") == (2, "length")
    with pytest.raises(ValidationError):
        InfillBody.model_validate({"input_prefix": "a"})
