"""Ollama's API: what reaches the engine or an encoder, what is refused by name, answers at every cut, and durations."""

import json
import math
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest

from outrider import models
from outrider.drafters.sequence import Finish
from outrider.server.app import new_fastapi
from outrider.server.encoders.messages import Loaded
from outrider.server.engine.engine import WorkerLost
from outrider.server.http.errors import APIError
from outrider.server.http.json_route import BodyPool
from outrider.server.ollama.embed import new_embed_router
from outrider.server.ollama.formatter import AnswerFormatter, Times
from outrider.server.ollama.schema import AnswerBody, ChatRequest, GenerateRequest, seconds_of
from outrider.server.openai.usage import Usage
from tests.server.fakes import VOCABULARY, FakeEngine, app_with, fetch, post
from tests.server.openai.test_generation import hermes, output

CHAT, GENERATE = "/api/chat", "/api/generate"
KEY = "a-key-of-some-length"
ASKED: list[Any] = [{"role": "user", "content": "Hi"}]


def lines(response: httpx.Response) -> list[Any]:
    assert (response.status_code, response.headers["content-type"]) == (200, "application/x-ndjson"), response.text
    return [json.loads(line) for line in response.text.splitlines()]


def test_a_stream_is_the_default_and_waits_with_empty_lines() -> None:
    found = lines(post(FakeEngine(None, "Hel", None, "lo"), CHAT, {"messages": ASKED}))
    assert [each["message"]["content"] for each in found] == ["", "Hel", "", "lo", ""]
    assert [each["done"] for each in found] == [False] * 4 + [True]
    broken = lines(post(FakeEngine("a", error=WorkerLost("It is lost.")), GENERATE, {"prompt": "x"}))
    assert broken[-1] == {"error": "It is lost."}


def test_options_reach_the_engine_and_unused_ones_are_named() -> None:
    engine = FakeEngine("Hello")
    options = {"num_predict": 9, "temperature": 0, "top_k": 5.0, "seed": -1, "stop": ["END"], "num_ctx": 99, "mirostat": 1}
    response = post(engine, CHAT, {"messages": ASKED, "stream": False, "options": options, "model": f"{models.NAME}:latest"})
    answer = response.json()
    assert (answer["model"], answer["message"]["content"]) == (f"{models.NAME}:latest", "Hello")
    assert response.headers["x-outrider-ignored"] == "options.num_ctx, options.mirostat"
    [request] = engine.requests
    assert (request.max_tokens, request.stop, request.params.temperature, request.params.top_k) == (9, ("END",), 0, 5)
    post(engine, CHAT, {"messages": ASKED, "options": {"num_predict": -1}})
    assert engine.requests[1].max_tokens == engine.context_tokens - len(engine.requests[1].prompt)
    defaults = engine.requests[1].params
    assert (defaults.temperature, defaults.top_p, defaults.top_k) == (0.8, 0.9, 40)


def test_the_chat_template_is_used_unless_the_prompt_is_raw() -> None:
    engine = FakeEngine("a")
    app = app_with(engine, "{{ messages[0].content }}|{{ messages[-1].content }}{{ '<think>' if enable_thinking }}")
    fetch(app, "POST", CHAT, {"messages": [{"role": "system", "content": "S"}, *ASKED]})
    fetch(app, "POST", GENERATE, {"system": "S", "prompt": "Hi"})
    fetch(app, "POST", CHAT, {"messages": [{"role": "system", "content": "S"}, *ASKED], "think": True})
    fetch(app, "POST", GENERATE, {"prompt": "S|Hi", "raw": True})
    chat, generated, thinking, raw = (request.prompt for request in engine.requests)
    assert chat == generated and thinking[: len(chat)] == chat and len(thinking) > len(chat)
    assert raw[-len(chat) :] == chat


def test_formats_are_grammars() -> None:
    engine = FakeEngine("{}")
    for format in ("json", {"type": "object"}, "", None):
        post(engine, CHAT, {"messages": ASKED, "format": format, "stream": False})
    assert [request.grammar is not None for request in engine.requests] == [True, True, False, False]


def test_results_name_their_tool_and_pictures_are_left_out() -> None:
    engine = FakeEngine("a")
    app = app_with(engine, "{% for m in messages %}{{ m.role }}{{ m.content }}{{ m.name }}{% endfor %}{{ tools }}")
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}
    result = {"role": "tool", "tool_name": "f", "content": "5"}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    assert fetch(app, "POST", CHAT, {"messages": [*ASKED, call, result], "tools": tools}).status_code == 200
    response = fetch(app, "POST", CHAT, {"messages": [{"role": "user", "content": "x", "images": ["AAAA"]}]})
    assert response.headers["x-outrider-ignored"] == "messages.image"


def test_without_a_prompt_the_model_is_loaded() -> None:
    for path, body in ((CHAT, {"messages": []}), (CHAT, {}), (GENERATE, {"prompt": ""}), (GENERATE, {})):
        answer = post(FakeEngine("a"), path, {**body, "keep_alive": "5m"}).json()
        assert (answer["done"], answer["done_reason"]) == (True, "load")
    assert "keeps its only model" in post(FakeEngine("a"), GENERATE, {"keep_alive": 0}).json()["error"]


def test_a_body_needs_no_type() -> None:
    sent = json.dumps({"model": models.NAME, "messages": ASKED}).encode()
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    assert fetch(app_with(FakeEngine("a")), "POST", CHAT, content=sent, headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("path", "fields", "expected"),
    [
        (GENERATE, {"prompt": "x", "template": "{{ .Prompt }}"}, "'template' is not supported"),
        (GENERATE, {"prompt": "x", "context": [1]}, "use /api/chat"),
        (GENERATE, {"prompt": "x", "raw": True, "system": "s"}, "no place for 'system'"),
        (GENERATE, {"prompt": "x", "suffix": "y"}, "no fill-in-the-middle tokens"),
        (CHAT, {"messages": ASKED, "options": {"temperature": 9}}, "Invalid 'options.temperature'"),
        (CHAT, {"messages": ASKED, "format": "xml"}, "Invalid 'format'"),
        (CHAT, {"messages": ASKED, "keep_alive": "soon"}, "Invalid 'keep_alive'"),
        (CHAT, {"messages": ASKED, "model": "other"}, "'other' does not exist"),
        (CHAT, {"messages": ASKED, "top_logprobs": 2}, "needs 'logprobs'"),
        ("/api/embed", {"input": "x"}, "needs an encoder"),
        ("/api/show", {"model": "other"}, "'other' does not exist"),
        ("/api/pull", {"model": "other"}, "run outrider pull"),
        ("/api/copy", {}, "There is no endpoint"),
    ],
)
def test_what_cannot_be_done_is_said_in_ollamas_form(path: str, fields: dict[str, Any], expected: str) -> None:
    response = post(FakeEngine("a"), path, fields)
    assert response.status_code in (400, 404) and list(response.json()) == ["error"]
    assert expected in response.json()["error"]


def test_what_is_told_of_the_model() -> None:
    app = app_with(FakeEngine("a"), auth__keys={"alice": KEY})
    own = {"Authorization": f"Bearer {KEY}"}
    assert list(fetch(app, "GET", "/api/tags").json()) == ["error"]
    [listed] = fetch(app, "GET", "/api/tags", headers=own).json()["models"]
    assert listed["model"] == f"{models.NAME}:latest" and listed["size"] > 0 and len(listed["digest"]) == 64
    shown = fetch(app, "POST", "/api/show", {"model": listed["model"]}, headers=own).json()
    family = shown["details"]["family"]
    assert shown["model_info"]["general.architecture"] == family and f"{family}.context_length" in shown["model_info"]
    assert "completion" in shown["capabilities"]
    assert fetch(app, "POST", "/api/pull", {}, headers=own).json() == {"status": "success"}
    assert fetch(app, "DELETE", "/api/delete", {}, headers=own).status_code == 400
    assert fetch(app, "GET", "/api/version", headers=own).json()["version"]
    assert fetch(app, "GET", "/api/ps", headers=own).json() == {"models": []}  # this worker has told nothing


async def embed(_: str, texts: list[str], __: Any, dimensions: int | None) -> tuple[bytes, list[int]]:
    vectors = [[len(text), 0.5, 0.25][:dimensions] for text in texts]
    return np.array(vectors, "<f4").tobytes(), [len(text) for text in texts]


def send(path: str, body: dict[str, Any]) -> Any:
    app = new_fastapi(BodyPool({}))
    service: Any = SimpleNamespace(
        kind="embeddings", loaded=Loaded(max_tokens=None, dimensions=3), read_characters=None, embed=embed
    )
    app.include_router(new_embed_router("m", service))
    return fetch(app, "POST", path, {"model": "m:latest", **body}).json()


def test_vectors() -> None:
    answer = send("/api/embed", {"input": ["a", "bcd"], "dimensions": 2})
    assert answer["embeddings"] == [[1, 0.5], [3, 0.5]]
    assert (answer["model"], answer["prompt_eval_count"]) == ("m:latest", 4)
    assert send("/api/embed", {"input": "a"})["embeddings"] == [[1, 0.5, 0.25]]
    assert send("/api/embeddings", {"prompt": "ab"}) == {"embedding": [2, 0.5, 0.25]}


def test_what_is_refused() -> None:
    assert send("/api/embed", {"input": ["a"], "dimensions": 4}) == {"error": "Invalid 'dimensions': m has 3."}
    assert "Invalid 'prompt'" in send("/api/embeddings", {"prompt": ""})["error"]


CALL = '<tool_call>\n{{"name": "{}", "arguments": {{"a": [1, "b"]}}}}\n</tool_call>'
ANSWER = f"<think>why</think>So:\n{CALL.format('f')}\n{CALL.format('g')}"
USAGE = Usage(prompt_tokens=12, cached_tokens=8, completion_tokens=9)
ASKS = ChatRequest.model_validate({"model": "m", "messages": []})


def formatter(body: AnswerBody = ASKS) -> AnswerFormatter:
    return AnswerFormatter(body, VOCABULARY, hermes, Times(0.0, 0.5, 1.0), {"first_token_ms": 1500.0})


def streamed(pieces: list[str], finish: Finish = "stop", body: AnswerBody = ASKS) -> list[Any]:
    """The lines of a streamed answer, one output per piece."""
    made = formatter(body)
    events = made.start()
    for piece in pieces:
        events += made.deltas(output(piece))
    return [event.data for event in events + made.deltas(output("", finish)) + made.end(USAGE)]


def built(lines: list[Any]) -> dict[str, Any]:
    """The message that a client builds from the lines."""
    message: dict[str, Any] = {"content": "", "thinking": "", "calls": []}
    for line in lines:
        message["content"] += line["message"]["content"]
        message["thinking"] += line["message"].get("thinking", "")
        message["calls"] += [call["function"] for call in line["message"].get("tool_calls", [])]
    return message


@pytest.mark.parametrize("size", [1, 2, 3, 7, 16, len(ANSWER)])
def test_lines_build_the_message_at_every_cut(size: int) -> None:
    lines = streamed([ANSWER[start : start + size] for start in range(0, len(ANSWER), size)])
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    message = built(lines)
    assert message == built([formatter().body([output(ANSWER, "stop")], USAGE)])
    assert (message["content"].strip(), message["thinking"]) == ("So:", "why")
    arguments = {"a": [1, "b"]}
    assert message["calls"] == [{"index": index, "name": name, "arguments": arguments} for index, name in enumerate(("f", "g"))]


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_the_last_line_has_times_and_counts(finish: Finish) -> None:
    last = streamed(["Hi"], finish)[-1]
    assert (last["done"], last["done_reason"], last["message"]["content"]) == (True, finish, "")
    assert (last["prompt_eval_count"], last["eval_count"]) == (12, 9)
    assert (last["load_duration"], last["prompt_eval_duration"]) == (10**9, 10**9)
    parts = sum(last[f"{name}_duration"] for name in ("load", "prompt_eval", "eval"))
    assert abs(last["total_duration"] - parts) < 10  # nanoseconds


def test_generated_text_is_no_message() -> None:
    lines = streamed(["Hi"], body=GenerateRequest.model_validate({"model": "m", "prompt": "x"}))
    assert [line["response"] for line in lines] == ["Hi", ""] and "message" not in lines[0]


def test_an_error_is_a_line() -> None:
    [line] = formatter().error(APIError(503, "lost"))
    assert line.encode() == b'{"error":"lost"}\n'


DURATIONS = [(None, None), (0, 0), (2.5, 2.5), ("0", 0), ("5m", 300), ("1h30m", 5400), ("1.5s", 1.5), ("300ms", 0.3)]


@pytest.mark.parametrize(("given", "seconds"), [*DURATIONS, (-1, math.inf), ("-1m", math.inf), (10**400, math.inf)])
def test_durations(given: Any, seconds: float | None) -> None:
    assert seconds_of(given) == seconds


@pytest.mark.parametrize("given", ["", "soon", "5 m", "m", True, [], "5mm"])
def test_what_is_no_duration(given: Any) -> None:
    with pytest.raises(ValueError, match="a number of seconds, or a duration"):
        seconds_of(given)
