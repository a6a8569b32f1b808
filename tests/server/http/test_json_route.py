"""JSON bodies: bounded before they are decoded strictly; large ones off the event loop, in their principal's turn."""

import asyncio
import gc
import json
import threading
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.server.anthropic.schema import MessagesBody
from outrider.server.http import json_body, json_route
from outrider.server.http.json_body import MAX_DEPTH, MAX_NODES, InvalidJSON, check_structure, decode
from outrider.server.http.json_route import INLINE_BYTES
from outrider.server.openai.schema import ChatBody
from tests.server.fakes import FakeEngine, app_with, fetch, post

TURN = {"role": "user", "content": [{"type": "text", "text": ""}, {"type": "text", "text": ""}]}


def readers(monkeypatch: pytest.MonkeyPatch, model: Any) -> list[str]:
    """The names of the threads that validate a model."""
    names: list[str] = []
    validate = model.__pydantic_validator__.validate_python

    class Validator:
        def __getattr__(self, name: str) -> Any:
            return getattr(original, name)

        def validate_python(self, value: Any, *args: Any, **kwargs: Any) -> Any:
            names.append(threading.current_thread().name)
            return validate(value, *args, **kwargs)

    original = model.__pydantic_validator__
    monkeypatch.setattr(model, "__pydantic_validator__", Validator())
    return names


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_a_large_body_is_decoded_off_the_event_loop(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []

    def decode(data: bytes) -> Any:
        names.append(threading.current_thread().name)
        return json_body.decode(data)

    monkeypatch.setattr(json_route, "decode", decode)
    engine = FakeEngine("a")
    engine.context_tokens = 1 << 20
    for size in (1, INLINE_BYTES):
        body = (
            {"input": "x" * size}
            if path == "/v1/responses"
            else {"messages": [{"role": "user", "content": "x" * size}], "max_tokens": 1}
        )
        assert post(engine, path, body).status_code == 200
    assert [name.startswith("outrider-bodies") for name in names] == [False, True]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens"])
def test_messages_are_counted_before_they_are_validated(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ChatBody if path == "/v1/chat/completions" else MessagesBody
    validated = readers(monkeypatch, model)
    response = post(FakeEngine("a"), path, {"messages": [TURN] * 2049, "max_tokens": 1})
    assert response.status_code == 400 and "at most 2048 messages" in response.json()["error"]["message"]
    assert validated == []


def test_the_memory_of_a_body_whose_client_leaves_is_free_at_once() -> None:
    """Without a garbage collection, which may come much later."""
    app = app_with(FakeEngine("a"))
    part = b"x" * (1 << 18)
    headers = [(b"content-type", b"application/json"), (b"content-length", b"8000000"), (b"host", b"127.0.0.1")]
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "raw_path": b"", "query_string": b""}
    scope |= {"headers": headers, "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80), "scheme": "http"}
    scope |= {"http_version": "1.1"}

    async def leave() -> None:
        parts = iter([b"[" + part[:-1]] + [bytes(bytearray(part)) for _ in range(20)])

        async def receive() -> dict[str, Any]:
            body = next(parts, None)
            return {"type": "http.disconnect"} if body is None else {"type": "http.request", "body": body, "more_body": True}

        async def send(message: Any) -> None:
            pass

        await app({**scope, "state": {}}, receive, send)

    async def run() -> int:
        await leave()
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(5):
            await leave()
        return tracemalloc.get_traced_memory()[0] - before

    gc.disable()
    tracemalloc.start()
    try:
        assert asyncio.run(run()) < 5 * 2 * len(part)  # of 5 * 21
    finally:
        tracemalloc.stop()
        gc.enable()


APP = app_with(FakeEngine("x"))
# Structure as text, which must not count.
awkward = st.text(st.sampled_from('[]{}:",\\ aé'), max_size=8)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats(allow_nan=False, allow_infinity=False) | awkward,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(awkward, inner, max_size=4),
    max_leaves=12,
)


def send(content: bytes, path: str = "/v1/responses") -> tuple[int, str | None]:
    """The status of the response to a body, and its error code."""
    response = fetch(app_with(FakeEngine("x")), "POST", path, content=content, headers={"content-type": "application/json"})
    return response.status_code, (response.json().get("error") or {}).get("code")


@given(values, st.booleans(), st.sampled_from([None, 1]))
def test_json_is_decoded_as_by_the_standard_library(value: Any, ascii_only: bool, indent: int | None) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    assert decode(text) == decode(text.encode()) == value


def test_structure_inside_strings_does_not_count() -> None:
    for text in ('[{":' * MAX_NODES, '\\"[' * MAX_NODES, "\\\\[" * MAX_NODES, '"]' * MAX_NODES):
        assert decode(json.dumps([text, text])) == [text, text]
    check_structure(json.dumps(["["] * MAX_NODES).encode())


def test_depth_is_bounded_before_decoding() -> None:
    for opening, closing in (("[", "]"), ('{"a":', "}"), ('[{"]":', "}]")):
        count = MAX_DEPTH // (opening.count("[") + opening.count("{"))
        assert decode(opening * count + "1" + closing * count)
        for more in (count + 1, 10_000):
            with pytest.raises(InvalidJSON, match="nested deeper than 128 levels"):
                decode(opening * more + "1" + closing * more)


@pytest.mark.parametrize("element", ["{}", "[]", "[1]", '{"":1}', '{"[":{}}', '"[",[]', '"[":1'])
def test_a_body_of_many_small_objects_is_rejected_before_decoding(element: str) -> None:
    with pytest.raises(InvalidJSON, match="has more than 131072 objects, arrays and fields"):
        decode("[" + ",".join([element] * (1 << 20)) + "]")


@pytest.mark.parametrize("text", ["NaN", "[Infinity]", '{"a": -Infinity}', "1e999", "-1e999", "9" * 5000, "{no", ""])
def test_numbers_and_text_that_json_does_not_have_are_rejected(text: str) -> None:
    with pytest.raises(InvalidJSON, match="is not valid JSON"):
        decode(text)
    assert send(text.encode() or b" ", "/tokenize") == (400, "invalid_json")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r'["\ud83c"]', "\ufffd"),
        (r'["a\ud83cb"]', "a\ufffdb"),
        (r'["\udf89\ud83c\udf89"]', "\ufffd\U0001f389"),
        (r'["\\ud83c \uD83C"]', "\\ud83c \ufffd"),
    ],
)
def test_half_a_character_becomes_the_sign_for_one_that_is_unknown(text: str, expected: str) -> None:
    """Programs cut texts inside of emojis, and their encoders write what is left."""
    assert decode(text) == [expected]


@pytest.mark.parametrize("encoding", ["gzip", "br", "identity, gzip"])
def test_a_compressed_body_is_refused_by_its_encoding(encoding: str) -> None:
    response = fetch(
        app_with(FakeEngine("x")), "POST", "/tokenize", content=b"\x1f\x8b", headers={"content-encoding": encoding}
    )
    assert response.status_code == 415 and f"Content-Encoding '{encoding}' is not supported" in response.text


def test_a_body_that_is_missing_is_asked_for() -> None:
    response = fetch(app_with(FakeEngine("x")), "POST", "/v1/chat/completions", content=b"")
    assert response.status_code == 400 and "The body must be a JSON object" in response.text


def test_a_validation_bomb_is_a_client_error() -> None:
    assert send(b'{"model":"m","input":[' + b"{}," * 100_000 + b"{}]}") == (400, "invalid_value")
    assert send(b'{"model":"m","input":[' + b"{}," * 2_000_000 + b"{}]}") == (400, "too_many")
    assert send(b'{"model":"m","input":' + b"[" * 600 + b"]" * 600 + b"}") == (400, "too_deep")
