"""/v1/messages and its count_tokens: what reaches the engine, what is refused by name, answers and their events, and errors."""

import re
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from outrider.drafters.sequence import Finish
from outrider.server.anthropic.messages import SIGNATURE, MessageFormatter
from outrider.server.anthropic.schema import MessagesBody
from outrider.server.openai.conversation import parse_arguments
from outrider.server.openai.usage import Usage
from tests.server.fakes import CONTEXT_TOKENS, FakeEngine, app_with, events, fetch, post
from tests.server.openai.test_generation import hermes, output

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
KEY = "a-key-of-some-length"
ASKED: list[Any] = [{"role": "user", "content": "Hi"}]
BODY: dict[str, Any] = {"max_tokens": 9, "messages": ASKED}


def test_a_stream_pings_while_it_waits() -> None:
    response = post(FakeEngine(None, None, "Hel", None, "lo"), PATH, {**BODY, "stream": True})
    kinds = [each["type"] for each in events(response)]
    assert kinds == [
        *("message_start", "ping", "ping", "content_block_start", "content_block_delta", "ping", "content_block_delta"),
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    assert response.headers["request-id"] == response.headers["x-request-id"]


def test_tokens_are_counted_as_they_are_read() -> None:
    engine = FakeEngine("a")
    fields: dict[str, Any] = {"messages": ASKED, "system": "Be short.", "tools": [{"name": "f", "input_schema": {}}]}
    app = app_with(engine)
    counted = fetch(app, "POST", COUNT, fields)
    assert counted.status_code == 200 and not engine.requests
    fetch(app, "POST", PATH, {**fields, "max_tokens": 1})
    assert counted.json() == {"input_tokens": len(engine.requests[0].prompt)}


def test_reasoning_is_a_thinking_block_and_has_a_budget() -> None:
    engine = FakeEngine("why", "</think>", "So.")
    app = app_with(engine, "{{ messages[0].content }}<think>", ("<think>", "</think>"))
    body = {**BODY, "thinking": {"type": "enabled", "budget_tokens": 99}}
    blocks = fetch(app, "POST", PATH, body).json()["content"]
    assert [block["type"] for block in blocks] == ["thinking", "text"]
    assert (blocks[0]["thinking"], blocks[1]["text"]) == ("why", "So.")
    fetch(app, "POST", PATH, {**body, "thinking": {"type": "disabled", "budget_tokens": 99}})
    limits = [request.reasoning and request.reasoning.max_tokens for request in engine.requests]
    assert limits == [99, None]


def test_tools_of_the_server_are_left_out_and_named(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "outrider.requests")
    tools = [{"type": "web_search_20250305", "name": "web_search"}, {"name": "f", "input_schema": {}}]
    for path in (PATH, COUNT):
        response = post(FakeEngine("a"), path, {**BODY, "tools": tools})
        assert (response.status_code, response.headers["x-outrider-ignored"]) == (200, "tools.web_search_20250305")
    logged = [record.__dict__["fields"] for record in caplog.records if record.message == "ignored"]
    assert [fields["ignored"] for fields in logged] == ["tools", "tools"]  # the types are the client's words
    assert "x-outrider-ignored" not in post(FakeEngine("a"), PATH, {**BODY, "tools": tools[1:]}).headers


def test_overflow_is_said_in_the_words_that_clients_match() -> None:
    long = [{"role": "user", "content": "word " * 2000}]
    message = check_error(post(FakeEngine("a"), PATH, {**BODY, "messages": long}), 400, "invalid_request_error")
    found = re.fullmatch(r"prompt is too long: (\d+) tokens > (\d+) maximum", message)
    assert found and int(found[1]) > int(found[2]) == CONTEXT_TOKENS - 1


def check_error(response: httpx.Response, status: int, kind: str) -> str:
    """Checks an error in Anthropic's format; returns its message."""
    body = response.json()
    assert (response.status_code, body["type"], body["error"]["type"]) == (status, "error", kind), response.text
    assert body["request_id"] == response.headers["x-request-id"] == response.headers["request-id"]
    return str(body["error"]["message"])


@pytest.mark.parametrize("path", [PATH, COUNT])
def test_errors_of_every_layer_have_anthropics_format(path: str) -> None:
    unknown = {"role": "user", "content": [{"type": "picture", "source": {}}]}
    app = app_with(FakeEngine("a"), auth__keys={"alice": KEY}, limits__body_bytes=2000)
    own = {"x-api-key": KEY}
    assert "x-api-key" in check_error(fetch(app, "POST", path, BODY), 401, "authentication_error")
    wrong = fetch(app, "POST", path, BODY, headers={"x-api-key": "wrong"})
    check_error(wrong, 401, "authentication_error")
    message = check_error(fetch(app, "POST", path, {**BODY, "messages": [unknown]}, headers=own), 400, "invalid_request_error")
    assert message.startswith("Invalid 'messages.0.content.0': this server supports content of the types text")
    check_error(fetch(app, "POST", path, {**BODY, "model": "other"}, headers=own), 404, "not_found_error")
    check_error(fetch(app, "POST", path, {**BODY, "system": "x" * 3000}, headers=own), 413, "request_too_large")
    check_error(fetch(app, "GET", path, headers=own), 405, "invalid_request_error")
    nameless = {**BODY, "messages": [*ASKED, {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "input": {}}]}]}
    check_error(fetch(app, "POST", path, nameless, headers=own), 400, "invalid_request_error")
    choice = {**BODY, "tool_choice": {"type": "any"}}
    assert "needs 'tools'" in check_error(fetch(app, "POST", path, choice, headers=own), 400, "invalid_request_error")
    assert fetch(app, "POST", path, BODY, headers=own).status_code == 200


def within(role: str, *blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(blocks)}]}


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x"}}
RESULT = {"type": "tool_result", "tool_use_id": "t", "content": "x"}
CALL = {"type": "tool_use", "id": "t", "name": "f", "input": {}}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (within("user", {"type": "picture"}), "not 'picture'"),
        (within("user", {**RESULT, "content": [{"type": "picture"}]}), "not 'picture'"),
        (within("user", CALL), "role 'user' cannot have content of the type 'tool_use'"),
        (within("assistant", RESULT), "role 'assistant' cannot have content of the type 'tool_result'"),
        ({"system": [IMAGE]}, "a system prompt can have content of the type 'text' only"),
        ({"mcp_servers": [{"url": "x"}]}, "'mcp_servers' is not supported"),
        ({"tool_choice": {"type": "tool"}}, "needs a 'name'"),
        ({"tools": [{"name": "has space", "input_schema": {}}]}, "pattern"),
    ],
)
def test_what_cannot_be_done_is_rejected_by_name(fields: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValidationError, match=expected) as raised:
        MessagesBody.model_validate({"model": "m", **BODY, **fields})
    assert raised.value.error_count() == 1


TOOL_CALL = '<tool_call>\n{{"name": "{}", "arguments": {{"a": [1, "b"]}}}}\n</tool_call>'
ANSWER = f"<think>why</think>So:\n{TOOL_CALL.format('f')}\n{TOOL_CALL.format('g')}"
INPUT = {"a": [1, "b"]}


def formatter(usage: Usage | None = None, **fields: Any) -> MessageFormatter:
    request = MessagesBody.model_validate({"model": "m", **BODY, **fields})
    return MessageFormatter(request, "msg_1", "req_1", 12, usage or Usage(), hermes)


def data_of(pieces: list[str], finish: Finish = "stop", stop_string: str | None = None, **fields: Any) -> list[dict[str, Any]]:
    """The data of all events of a streamed answer, one output per piece."""
    usage = Usage(prompt_tokens=12, cached_tokens=8, completion_tokens=9)
    streamed = formatter(usage, **fields)
    made = streamed.start()
    for piece in pieces:
        made += streamed.deltas(output(piece))
    made += streamed.deltas(output("", finish, stop_string=stop_string)) + streamed.end(usage)
    data = [event.data for event in made if isinstance(event.data, dict)]
    assert [event.name for event in made] == [each["type"] for each in data]
    return data


def message_of(data: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client builds from a stream's events, which must be in Anthropic's order."""
    assert [each["type"] for each in data[:2]] == ["message_start", "ping"]
    assert [each["type"] for each in data[-2:]] == ["message_delta", "message_stop"]
    message: dict[str, Any] = {**data[0]["message"], "content": []}
    blocks: list[dict[str, Any]] = message["content"]
    arguments, is_open = "", False
    for each in data[2:-2]:
        if each["type"] == "content_block_start":
            assert not is_open and each["index"] == len(blocks)
            is_open, arguments = True, ""
            blocks.append({**each["content_block"]})
            continue
        assert is_open and each["index"] == len(blocks) - 1
        block = blocks[-1]
        if each["type"] == "content_block_stop":
            is_open = False
            if block["type"] == "tool_use":
                block["input"] = parse_arguments(arguments)
            continue
        match each["delta"]:
            case {"type": "text_delta", "text": text}:
                block["text"] += text
            case {"type": "thinking_delta", "thinking": text}:
                block["thinking"] += text
            case {"type": "signature_delta", "signature": text}:
                block["signature"] = text
            case {"type": "input_json_delta", "partial_json": text}:
                arguments += text
    assert not is_open
    return {**message, **data[-2]["delta"], "usage": data[-2]["usage"]}


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    content = [{name: value for name, value in block.items() if name != "id"} for block in message["content"]]
    return {**message, "content": content}


def whole(text: str, finish: Finish = "stop", stop_string: str | None = None, **fields: Any) -> dict[str, Any]:
    usage = Usage(prompt_tokens=12, cached_tokens=8, completion_tokens=9)
    return formatter(usage, **fields).body([output(text, finish, stop_string=stop_string)], usage)


def test_a_message() -> None:
    message = whole(ANSWER)
    thinking, text, first, second = message["content"]
    assert thinking == {"type": "thinking", "thinking": "why", "signature": SIGNATURE}
    assert text["type"] == "text" and text["text"].strip() == "So:"
    assert [(call["type"], call["name"], call["input"]) for call in (first, second)] == [
        ("tool_use", "f", INPUT),
        ("tool_use", "g", INPUT),
    ]
    assert first["id"].startswith("toolu_") and first["id"] != second["id"]
    assert (message["id"], message["type"], message["role"], message["model"]) == ("msg_1", "message", "assistant", "m")
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)
    usage = message["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (4, 8, 9)
    assert usage["cache_creation_input_tokens"] == 0


@pytest.mark.parametrize("size", range(1, len(ANSWER) + 1))
def test_events_build_the_message_at_every_cut(size: int) -> None:
    data = data_of([ANSWER[start : start + size] for start in range(0, len(ANSWER), size)])
    built, expected = message_of(data), whole(ANSWER)
    for message in (built, expected):
        message["usage"].pop("output_tokens_details")  # they depend on the cut: each output is one token
    assert without_ids(built) == without_ids(expected)


def test_the_first_event_has_the_usage_of_the_prompt() -> None:
    start = data_of(["Hi"])[0]["message"]
    assert (start["stop_reason"], start["content"]) == (None, [])
    assert (start["usage"]["input_tokens"], start["usage"]["cache_read_input_tokens"]) == (4, 8)
    early = formatter().start()[0].data  # before the prompt is read
    assert isinstance(early, dict) and early["message"]["usage"]["input_tokens"] == 12


@pytest.mark.parametrize(
    ("text", "finish", "stop_string", "expected"),
    [
        ("Hi", "stop", None, ("end_turn", None)),
        ("Hi", "length", None, ("max_tokens", None)),
        ("Hi", "stop", "END", ("stop_sequence", "END")),
        (TOOL_CALL.format("f"), "stop", None, ("tool_use", None)),
        (TOOL_CALL.format("f"), "length", None, ("max_tokens", None)),
        ("", "stop", None, ("end_turn", None)),
    ],
)
def test_stop_reasons(text: str, finish: Finish, stop_string: str | None, expected: tuple[str, str | None]) -> None:
    for message in (whole(text, finish, stop_string), message_of(data_of([text], finish, stop_string))):
        assert (message["stop_reason"], message["stop_sequence"]) == expected
        assert len(message["content"]) == (text != "")
