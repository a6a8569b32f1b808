"""Large bodies are read off the event loop, in their principal's turn and once; small ones at once."""

from __future__ import annotations

import asyncio
import gc
import threading
import tracemalloc
from typing import Any

import pytest

from outrider.server.anthropic.schema import MessagesBody
from outrider.server.http import json_body, json_route
from outrider.server.http.json_route import INLINE_BYTES, BodyPool
from outrider.server.openai.schema import ChatBody
from tests.server.fakes import FakeEngine, app_with, post

TURN = {"role": "user", "content": [{"type": "text", "text": ""}, {"type": "text", "text": ""}]}


def chat(size: int) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "x" * size}]}


def long_engine() -> FakeEngine:
    engine = FakeEngine("a")
    engine.context_tokens = 1 << 20
    return engine


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
    for size in (1, INLINE_BYTES):
        body = {"input": "x" * size} if path == "/v1/responses" else chat(size) | {"max_tokens": 1}
        assert post(long_engine(), path, body).status_code == 200
    assert [name.startswith("outrider-bodies") for name in names] == [False, True]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens"])
def test_messages_are_counted_before_they_are_validated(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ChatBody if path == "/v1/chat/completions" else MessagesBody
    validated = readers(monkeypatch, model)
    response = post(FakeEngine("a"), path, {"messages": [TURN] * 2049, "max_tokens": 1})
    assert response.status_code == 400 and "at most 2048 messages" in response.json()["error"]["message"]
    assert validated == []


async def test_principals_take_turns_and_the_event_loop_stays_free() -> None:
    """One at a time per principal: the second of alice's bodies does not run before bob's."""
    done: list[str] = []

    pool = BodyPool({})
    started = threading.Event()

    async def send(principal: str) -> None:
        await pool.run(principal, lambda: started.wait(5))
        done.append(principal)

    tasks = [asyncio.create_task(send(principal)) for principal in ("alice", "alice", "alice", "bob")]
    await asyncio.sleep(0)
    started.set()  # the event loop runs while a body is processed
    await asyncio.gather(*tasks)
    pool.close()
    assert "bob" in done[:2]


def test_the_memory_of_a_body_whose_client_leaves_is_free_at_once() -> None:
    """Without a garbage collection, which may come much later."""
    app = app_with(FakeEngine("a"))
    part = b"x" * (1 << 18)
    headers = [(b"content-type", b"application/json"), (b"content-length", b"8000000"), (b"host", b"127.0.0.1")]
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "raw_path": b"", "query_string": b""}
    scope |= {
        "headers": headers,
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
        "scheme": "http",
        "http_version": "1.1",
    }

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
