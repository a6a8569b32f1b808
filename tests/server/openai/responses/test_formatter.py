"""Responses: objects, events, continued conversations, errors; and the store, where a principal sees only its own."""

import threading
from typing import Any

import pytest
from fastapi import FastAPI

from outrider.server.engine.engine import DeadlineExceeded
from outrider.server.engine.messages import TokenLogprobs
from outrider.server.http import json_route
from outrider.server.http.errors import APIError
from outrider.server.openai.conversation import Message
from outrider.server.openai.responses import store
from outrider.server.openai.responses.endpoint import ResponseFormatter
from outrider.server.openai.responses.schema import ResponsesBody
from outrider.server.openai.responses.store import ResponseStore, StoredResponse
from outrider.server.openai.usage import Usage
from outrider.verify.sampling_params import SamplingParams
from tests.server.fakes import VOCABULARY, FakeEngine, app_with, events, fetch
from tests.server.openai.test_generation import hermes, output

PATH = "/v1/responses"
ANSWER = '<think>why</think>So:\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def formatter(**fields: Any) -> ResponseFormatter:
    body = ResponsesBody.model_validate({"model": "m", "input": "x", **fields})
    return ResponseFormatter(body, "resp_1", SamplingParams(), hermes, VOCABULARY)


def data_of(formatter: ResponseFormatter, text: str) -> list[dict[str, Any]]:
    """The data of all events of a streamed answer, one character per output."""
    made = formatter.start()
    for character in text:
        made += formatter.deltas(output(character, logprobs=TokenLogprobs([-0.5], [[]], [[]])))
    made += formatter.deltas(output("", "stop")) + formatter.end(Usage(prompt_tokens=3, completion_tokens=9))
    for event in made:
        assert isinstance(event.data, dict)
        assert event.name == event.data["type"]
        assert event.padded == event.data["type"].endswith(".delta")
    return [event.data for event in made if isinstance(event.data, dict)]


def test_events_build_the_response() -> None:
    streamed = formatter()
    data = data_of(streamed, ANSWER)
    assert [each["sequence_number"] for each in data] == list(range(len(data)))
    kinds = [each["type"].removeprefix("response.") for each in data]
    without_repeats = [kind for number, kind in enumerate(kinds) if not number or kind != kinds[number - 1]]
    assert without_repeats == [
        *("created", "in_progress", "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done", "output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done", "output_item.added", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done", "completed"),
    ]
    reasoning, message, call = data[-1]["response"]["output"]
    assert reasoning["content"][0]["text"] == "why"
    assert message["content"][0]["text"] == "So:"
    assert (call["name"], call["arguments"], call["status"]) == ("f", '{"a": 1}', "completed")
    for number, item in enumerate(data[-1]["response"]["output"]):
        deltas = [each for each in data if each["type"].endswith(".delta") and each["output_index"] == number]
        assert {each["item_id"] for each in deltas} == {item["id"]}
    assert data[-1]["response"]["usage"]["output_tokens_details"] == {"reasoning_tokens": 3}


@pytest.mark.parametrize("texts", [["a<", "tool_", "x"], ["", "", "\u00e9"], ["x", ""], ["<tool_call", ">", ""]], ids=str)
def test_every_token_of_a_text_has_one_logprob_however_late_its_text_comes(texts: list[str]) -> None:
    outputs = [output(text, logprobs=TokenLogprobs([float(number)], [[]], [[]])) for number, text in enumerate(texts)]
    outputs.append(output("", "stop"))
    usage, streamed = Usage(prompt_tokens=3, completion_tokens=9), formatter()
    whole = formatter().body(outputs, usage)["output"][0]["content"][0]["logprobs"]
    made: list[Any] = [event.data for each in outputs for event in streamed.deltas(each)]
    made += [event.data for event in streamed.end(usage)]
    by_kind = {each["type"].removeprefix("response."): each for each in made}
    added, done = by_kind["content_part.added"]["part"]["logprobs"], by_kind["output_text.done"]["logprobs"]
    deltas = [entry for each in made if each["type"].endswith("text.delta") for entry in each["logprobs"]]
    assert added == [] and whole == deltas == done
    assert [entry["logprob"] for entry in whole] == [*range(len(texts))]


def test_an_error_in_mid_stream_fails_the_response() -> None:
    app = app_with(FakeEngine("a", error=DeadlineExceeded("too late")))
    data = events(fetch(app, "POST", PATH, {"input": "x", "stream": True}))
    assert data[-1]["type"] == "response.failed"
    assert data[-1]["response"]["error"] == {"code": "server_error", "message": "too late"}
    stored = fetch(app, "GET", f"{PATH}/{data[-1]['response']['id']}")
    assert stored.status_code == 404


def conversation(app: FastAPI, engine: FakeEngine, **second: Any) -> tuple[str, list[int], list[int]]:
    """The first response's id, and the prompts of a first and a second request."""
    first = fetch(app, "POST", PATH, {"input": "one", "instructions": "Be short."}).json()
    fetch(app, "POST", PATH, {"input": "two", "previous_response_id": first["id"], **second})
    return first["id"], engine.requests[0].prompt, engine.requests[1].prompt


def test_a_conversation_continues_in_the_first_responses_session() -> None:
    engine = FakeEngine("answer")
    template = "{% for m in messages %}[{{ m.role }}: {{ m.content }}]{% endfor %}"
    app = app_with(engine, template, sessions__automatic="off")
    first, _, prompt = conversation(app, engine)
    text = fetch(app, "POST", "/detokenize", {"tokens": prompt}).json()["prompt"]
    assert "[user: one][assistant: answer][user: two]" in text
    assert "Be short." not in text  # instructions apply to one response only
    assert [request.session for request in engine.requests] == [f"127.0.0.1 {first}"] * 2
    conversation(app, engine, prompt_cache_key="mine")
    assert engine.requests[-1].session == "127.0.0.1 mine"
    by_text = FakeEngine("answer")
    conversation(app_with(by_text, template), by_text, prompt_cache_key="mine")
    assert [request.session for request in by_text.requests] == [None, None]  # found by their text


def test_stored_responses_are_retrieved_and_deleted() -> None:
    app = app_with(FakeEngine("a"))
    made = fetch(app, "POST", PATH, {"input": "x"}).json()
    path = f"{PATH}/{made['id']}"
    assert fetch(app, "GET", path).json() == made
    cancelled = fetch(app, "POST", f"{path}/cancel")
    assert (cancelled.status_code, cancelled.json()["error"]["param"]) == (400, "response_id")
    assert fetch(app, "DELETE", path).json() == {"id": made["id"], "object": "response", "deleted": True}
    for method, suffix in (("GET", ""), ("DELETE", ""), ("POST", "/cancel")):
        assert fetch(app, method, path + suffix).status_code == 404
    not_stored = fetch(app, "POST", PATH, {"input": "x", "store": False}).json()["id"]
    assert fetch(app, "POST", PATH, {"input": "y", "previous_response_id": not_stored}).status_code == 404


BUDGET_BYTES = 10_000


def stored(response_id: str, principal: str = "alice", text: str = "x") -> StoredResponse:
    return StoredResponse(principal, {"id": response_id}, [Message(role="user", content=text)], session=response_id)


def is_stored(store: ResponseStore, response_id: str, principal: str = "alice") -> bool:
    try:
        return store.get(response_id, principal).id == response_id
    except APIError:
        return False


@pytest.mark.parametrize("stream", [False, True])
def test_a_large_response_is_encoded_off_the_event_loop(monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    init, threads = StoredResponse.__init__, list[bool]()

    def watched(self: StoredResponse, *arguments: Any) -> None:
        threads.append(threading.current_thread() is threading.main_thread())
        init(self, *arguments)

    monkeypatch.setattr(StoredResponse, "__init__", watched)
    monkeypatch.setattr(json_route, "INLINE_BYTES", 4096)
    app, path = app_with(FakeEngine("x")), "/v1/responses"
    metadata = {f"key{number}": "x" * 512 for number in range(16)}
    for fields in ({}, {"metadata": metadata, "store": False}, {"metadata": metadata}):
        assert fetch(app, "POST", path, {"input": "x", "stream": stream, **fields}).status_code == 200
    assert threads == [True, False]


def test_large_responses_evict_only_their_principals() -> None:
    store = ResponseStore(100, 60, BUDGET_BYTES)
    store.put(stored("bobs", "bob"))
    for number in range(50):
        store.put(stored(str(number), text="x" * 3000))
    assert [is_stored(store, str(number)) for number in (46, 47, 48, 49)] == [False, True, True, True]
    store.put(stored("huge", text="x" * BUDGET_BYTES))
    assert not is_stored(store, "huge") and is_stored(store, "49") and is_stored(store, "bobs", "bob")
    store.delete("49", "alice")
    store.put(stored("next", text="x" * 3000))
    assert is_stored(store, "47") and is_stored(store, "next")


def test_expired_responses_are_gone() -> None:
    store = ResponseStore(2, 0, BUDGET_BYTES)
    store.put(stored("a"))
    with pytest.raises(APIError):
        store.get("a", "alice")
    store.put(stored("b"))  # removes the expired one, and does not fail when nothing is left


def test_keys_share_the_total_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {"alice": {"key": "alices-key"}, "bob": {"key": "bobs-secret"}}
    monkeypatch.setattr(store, "RESPONSES_BYTES", 10_000)
    app = app_with(FakeEngine("x"), auth__keys=keys)

    def is_kept(**metadata: str) -> bool:
        headers = {"Authorization": "Bearer alices-key"}
        response_id = fetch(app, "POST", "/v1/responses", {"input": "x", "metadata": metadata}, headers=headers).json()["id"]
        return fetch(app, "GET", f"/v1/responses/{response_id}", headers=headers).status_code == 200

    assert is_kept() and not is_kept(**{f"key{number}": "x" * 512 for number in range(9)})
