"""The engine's requests: every field arrives or is rejected by name, and bounds are checked before anything is queued."""

import asyncio
from typing import Any

import pytest
from fastapi import Request as HTTPRequest

from outrider.server.chat.prompt import PromptEncoder
from outrider.server.engine.messages import Ready
from outrider.server.llama.schema import InfillBody
from outrider.server.openai import requests
from outrider.server.openai.requests import RequestBuilder
from outrider.server.openai.responses import schema as responses
from outrider.server.openai.schema import ChatBody, CompletionBody
from outrider.server.settings import load_settings
from tests.server.fakes import CONTEXT_TOKENS, TOKENIZER, FakeEngine, app_with, fetch, post
from tests.server.openai.test_models import ENDPOINTS, MARKERS

PATH = "/v1/completions"
ALICE = "alices-secret-key"


def test_every_field_reaches_the_engine() -> None:
    engine = FakeEngine("a")
    fields: dict[str, Any] = {"stop": ["x"], "n": 2, "session_id": "s", "priority": -1, "stop_token_ids": [9], "regex": "a+"}
    fields |= {"prediction": {"type": "content", "content": "guess"}, "include_stop_str_in_output": True}
    fields |= {"speculation": {"drafter": "trigram", "max_nodes": 4}, "echo": True, "logprobs": 1, "skip_special_tokens": False}
    assert post(engine, PATH, {"prompt": [[5, 6], [7]], "max_tokens": 5000, **fields}).status_code == 200
    first, _, second, _ = engine.requests
    assert (first.stop, first.priority, first.stop_token_ids) == (("x",), -1, [9])
    assert first.prediction == TOKENIZER.encode("guess", add_special_tokens=False)
    assert (first.drafter, first.max_nodes) == ("trigram", 4)
    assert first.keep_stop and first.wants_prompt_logprobs and not first.skip_special_tokens and first.grammar
    assert (first.max_tokens, second.max_tokens) == (CONTEXT_TOKENS - 2, CONTEXT_TOKENS - 1)
    assert first.id != second.id and first.params.seed != second.params.seed
    assert first.principal == "anyone"


def test_the_session_id_of_the_body_overrides_header_and_cache_key() -> None:
    engine = FakeEngine("a")
    app = app_with(engine, auth__keys={"alice": ALICE}, sessions__automatic="off")
    for headers, fields in (
        ({"X-Session-Id": "header" * 100}, {"session_id": "body", "prompt_cache_key": "key"}),
        ({"X-Session-Id": "header" * 100}, {"prompt_cache_key": "key"}),
        ({}, {"prompt_cache_key": "key"}),
        ({}, {}),
    ):
        fetch(app, "POST", PATH, {"prompt": "x", **fields}, headers={"Authorization": f"Bearer {ALICE}", **headers})
    assert [request.session for request in engine.requests] == ["body", ("header" * 100)[:256], "key", None]


def test_a_cache_key_names_no_session_where_sessions_are_found_by_text() -> None:
    """Sub-agents share their agent's key, but not its text."""
    engine = FakeEngine("a")
    for name in ("prompt_cache_key", "session_id"):
        post(engine, PATH, {"prompt": "x", name: "key"}, sessions__automatic="on")
    assert [request.session for request in engine.requests] == [None, "127.0.0.1 key"]


@pytest.mark.parametrize("field", ["session_id", "prompt_cache_key", "X-Session-Id"])
def test_a_guessed_session_of_another_machine_is_not_found_on_a_server_without_keys(field: str) -> None:
    engine = FakeEngine("a")
    app = app_with(engine, sessions__automatic="off")
    headers, fields = ({field: "guess"}, {}) if field.startswith("X-") else ({}, {field: "guess"})
    for address in ("192.0.2.1", "192.0.2.2", "192.0.2.1"):
        fetch(app, "POST", PATH, {"prompt": "x", **fields}, client=(address, 1234), headers=headers)
    first, other, again = (request.session for request in engine.requests)
    assert first == again != other
    assert {request.principal for request in engine.requests} == {"anyone"}


def test_choices_share_a_temporary_session_that_ends_with_the_request() -> None:
    engine = FakeEngine("a")
    app = app_with(engine)
    fetch(app, "POST", PATH, {"prompt": ["x", "y"], "n": 2, "seed": 3})
    assert len({request.id for request in engine.requests}) == 4
    assert len({request.session for request in engine.requests}) == 1 and engine.requests[0].temporary
    assert engine.forgotten == [engine.requests[0].session]
    assert [request.params for request in engine.requests[:2]] == [request.params for request in engine.requests[2:]]
    fetch(app, "POST", PATH, {"prompt": "x", "n": 2, "session_id": "s"})
    fetch(app, "POST", PATH, {"prompt": "x"})
    assert [request.session for request in engine.requests[4:]] == ["127.0.0.1 s", "127.0.0.1 s", None]
    assert len(engine.forgotten) == 1


def test_each_choice_of_each_prompt_counts_towards_the_rate() -> None:
    charged: list[tuple[str, int]] = []

    async def loaded() -> Ready:
        return await FakeEngine().wait_started()

    builder = RequestBuilder(
        load_settings(), PromptEncoder(TOKENIZER), loaded, lambda principal, requests: charged.append((principal, requests))
    )
    body = CompletionBody(model="m", prompt="x", n=3)
    http = HTTPRequest({"type": "http", "headers": [], "state": {"principal": "alice"}})
    asyncio.run(builder.build(http, body, [[1], [2]]))
    assert charged == [("alice", 5)]


@pytest.mark.parametrize(
    ("fields", "status", "param", "words"),
    [
        ({"model": "other"}, 404, "model", "this server serves"),
        ({"speculation": {"drafter": "draft"}}, 400, "speculation", "needs a draft model"),
        ({"n": 17}, 400, "n", "at most 16 choices"),
        ({"best_of": 17}, 400, "best_of", "at most 16 choices"),
        ({"stop": ["x"] * 17}, 400, "stop", "at most 16"),
        ({"stop": "x" * 501}, 400, "stop", "at most 500"),
        ({"logit_bias": {str(token): 1 for token in range(1025)}}, 400, "logit_bias", "at most 1024"),
        ({"logit_bias": {"999999": 1}}, 400, "logit_bias", "from 0 to"),
        ({"stop_token_ids": [1] * 129}, 400, "stop_token_ids", "at most 128 stop tokens"),
        ({"stop_token_ids": [999999]}, 400, "stop_token_ids", "from 0 to"),
        ({"prompt": [3] * CONTEXT_TOKENS}, 400, "prompt", f"maximum context length is {CONTEXT_TOKENS} tokens"),
        ({"prompt": [999999]}, 400, "prompt", "from 0 to"),
        ({"regex": "a", "choice": ["b"]}, 400, "regex", "only one of"),
    ],
)
def test_bodies_beyond_the_bounds_are_rejected(fields: dict[str, Any], status: int, param: str, words: str) -> None:
    engine = FakeEngine("a")
    response = post(engine, PATH, {"prompt": "x", **fields})
    assert response.status_code == status
    error = response.json()["error"]
    assert error["param"] == param and words in error["message"]
    assert not engine.requests


ECHO: dict[str, Any] = {"prompt": [[3] * 50] * 2, "echo": True, "logprobs": 4, "n": 2}


@pytest.mark.parametrize(
    ("fields", "limit", "max_tokens"),
    [
        (ECHO | {"max_tokens": 0}, 1000, 0),
        (ECHO | {"max_tokens": 0}, 999, None),
        (ECHO | {"max_tokens": 10}, 1200, 10),
        (ECHO | {"max_tokens": 10}, 1199, None),
        ({"prompt": "x", "logprobs": 0, "max_tokens": 1 << 40}, CONTEXT_TOKENS, CONTEXT_TOKENS - 1),
        ({"prompt": "x", "best_of": 4, "max_tokens": 10}, 39, None),
        ({"prompt": "x", "max_tokens": 10}, 1, 10),
    ],
)
def test_the_product_of_choices_tokens_and_logprobs_is_bounded(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], limit: int, max_tokens: int | None
) -> None:
    monkeypatch.setattr(requests, "MAX_LOGPROBS", limit)
    engine = FakeEngine("a")
    response = post(engine, PATH, fields)
    assert [request.max_tokens for request in engine.requests[:1]] == ([] if max_tokens is None else [max_tokens])
    if max_tokens is None:
        assert response.status_code == 400 and "lower 'logprobs', 'n', 'max_tokens'" in response.json()["error"]["message"]


def test_a_trace_needs_a_stream_on_a_server_that_shows_its_drafts() -> None:
    fields = {"prompt": "x", "stream": True, "speculation": {"trace": True}}
    engine = FakeEngine("a")
    assert post(engine, PATH, fields).status_code == 200 and engine.requests[0].trace
    for settings, changed, sentence in (
        ({}, {"stream": False}, "needs a stream"),
        ({"speculation__trace": False}, {}, "set its setting of that name to true"),
        ({"server__coalesce_ms": 100}, {}, "would show the draft acceptance"),
    ):
        response = post(FakeEngine("a"), PATH, fields | changed, **settings)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "speculation.trace") and sentence in error["message"]


@pytest.mark.parametrize(("setting", "status"), [({}, 400), ({"speculation__trace": True}, 200)])
def test_a_server_with_keys_shows_drafts_only_if_its_settings_say_so(setting: dict[str, Any], status: int) -> None:
    app = app_with(FakeEngine("a"), auth__keys={"alice": "alices-secret"}, **setting)
    fields = {"prompt": "x", "stream": True, "speculation": {"trace": True}}
    response = fetch(app, "POST", PATH, fields, headers={"authorization": "Bearer alices-secret"})
    assert response.status_code == status


def affinity(
    engine: FakeEngine, body: dict[str, Any], path: str = "/v1/chat/completions", key: str = ALICE, **headers: str
) -> str:
    app = app_with(engine, auth__keys={"alice": ALICE, "bob": "bobs-secret-key"})
    answer = fetch(app, "POST", path, body, headers={"Authorization": f"Bearer {key}", **headers})
    assert answer.status_code == 200, answer.text
    return engine.requests[-1].affinity


def test_the_turns_of_a_conversation_have_one_affinity() -> None:
    engine = FakeEngine("a")
    first = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello."}]
    later = [*first, {"role": "assistant", "content": "Hi."}, {"role": "user", "content": "Go on."}]
    found = affinity(engine, {"messages": first})
    assert found == affinity(engine, {"messages": later})
    assert found == affinity(engine, {"messages": later, "n": 2})  # a temporary session of the choices does not count
    other = {
        affinity(engine, {"messages": [first[0], {"role": "user", "content": "Hello!"}]}),
        affinity(engine, {"messages": [{"role": "system", "content": "Be long."}, first[1]]}),
        affinity(engine, {"messages": first}, key="bobs-secret-key"),
        affinity(engine, {"messages": first, "session_id": "s"}),
    }
    assert len(other | {found}) == 5


CHATS, COMPLETIONS, RESPONSES, INFILL = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/infill"
TABLES = {
    CHATS: ChatBody.unsupported,
    COMPLETIONS: CompletionBody.unsupported,
    RESPONSES: responses.UNSUPPORTED,
    INFILL: InfillBody.unsupported,
}
FIELDS = [(path, name) for path, table in TABLES.items() for name in table]
APP = app_with(FakeEngine("a"), special_tokens=MARKERS)


@pytest.mark.parametrize(("path", "name"), FIELDS)
def test_a_field_is_accepted_only_with_a_value_without_effect(path: str, name: str) -> None:
    for value in TABLES[path][name]:
        assert fetch(APP, "POST", path, {**ENDPOINTS[path], name: value}).status_code == 200, value
    for value in ("other", 0.123, {"x": 1}):
        error = fetch(APP, "POST", path, {**ENDPOINTS[path], name: value}).json()["error"]
        assert (error["param"], error["code"]) == (name, "unsupported_parameter")
        assert f"'{name}' is not supported" in error["message"]


def test_llama_servers_names_have_their_meaning() -> None:
    body = CompletionBody.model_validate({"model": "m", "prompt": "x", "n_predict": 7, "repeat_penalty": 1.5})
    assert (body.token_limit, body.sampling_params().repetition_penalty) == (7, 1.5)
    both = CompletionBody.model_validate({"model": "m", "prompt": "x", "n_predict": 7, "max_tokens": 5})
    assert both.token_limit == 5
    for limited, limit in (({"n_predict": -1}, None), ({}, 16), ({"n_predict": 0}, 0)):
        assert CompletionBody.model_validate({"model": "m", "prompt": "x", **limited}).token_limit == limit
    chat = ChatBody.model_validate({"model": "m", **ENDPOINTS[CHATS], "n_predict": 7})
    assert chat.token_limit == 7
    biased = CompletionBody.model_validate({"model": "m", "prompt": "x", "logit_bias": [[15, -2.5], [27, False]]})
    assert biased.sampling_params().logit_bias == {15: -2.5, 27: -100}
