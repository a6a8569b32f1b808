"""What loads a model: valid requests only. The models are scripted; tests/integration/test_several_models.py has real ones."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import httpx
import numpy as np
import pytest
from fastapi import FastAPI
from numpy.typing import NDArray

from outrider import models
from outrider.server.app import add_routes, create_endpoints, new_fastapi
from outrider.server.corpora.registry import Corpora
from outrider.server.engine.engine import Engine
from outrider.server.models import app as module
from outrider.server.models.catalog import Entry
from outrider.server.models.loaded import Served, Shared, settings_of
from outrider.server.settings import load_settings
from outrider.server.telemetry.metrics import Metrics
from tests.server.fakes import TOKENIZER, FakeEngine, fetch
from tests.servers import ALICE, BOB

KEYS = {"alice": ALICE, "bob": BOB}
CHAT = {"model": "b", "messages": [{"role": "user", "content": "x"}]}


class Several:
    """A server of the models a and b, which counts how often one is loaded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
        self.loads: list[str] = []
        monkeypatch.setattr(module, "load", self.load)
        monkeypatch.setattr(module, "with_folder", lambda settings, _: settings)  # nothing would remove a folder: no app ends
        flags = {name.replace("__", "."): value for name, value in settings.items()}
        entries = [
            Entry(load_settings(None, {"model.path": str(models.TARGET), "model.name": name, **flags}), 1)
            for name in ("a", "b")
        ]
        self.app: FastAPI = module.create_app(load_settings(None, flags), entries)

    async def load(self, entry: Entry, shared: Shared) -> Served:
        self.loads.append(entry.name)
        metrics, engine, app = Metrics(), cast(Engine, FakeEngine("x")), new_fastapi(shared.bodies)
        own = settings_of(entry, None)
        endpoints = create_endpoints(own, TOKENIZER, engine, shared.grammars, metrics, shared.quotas, None, shared.store)
        add_routes(app, endpoints, None)
        return Served(None, app, metrics.registry, engine, endpoints.models.card)

    def send(self, method: str, path: str, body: Any = None, key: str | None = None, **headers: str) -> httpx.Response:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if key is not None:
            sent["Authorization"] = f"Bearer {key}"
        return fetch(self.app, method, path, body, headers=sent)


async def encoded(texts: Sequence[str]) -> list[NDArray[np.uint32]]:
    return [np.arange(5, dtype=np.uint32) for _ in texts]


OPEN = ["/health", "/ready", "/version", "/metrics", "/", "/page/x", "/page/", "/page/../v1/chat/completions"]


def test_nothing_without_a_key_loads_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Several(monkeypatch, auth__keys=KEYS, metrics__port=0)
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH", "HEAD", "GET"):
        for path in OPEN:
            answer = server.send(method, f"{path}?model=a", None if method in ("GET", "HEAD") else {"model": "b"})
            expected = (200, 401, 404, 405) if method in ("GET", "HEAD") else (401,)
            assert answer.status_code in expected, (method, path)
    assert not server.loads


INVALID: list[tuple[str, str, Any, int]] = [
    ("GET", "/favicon.ico?model=a", None, 404),
    ("POST", "/v1/nothing", CHAT, 404),
    ("POST", "/v1/models", CHAT, 405),
    ("GET", "/v1/chat/completions?model=b", None, 405),
    ("DELETE", "/v1/chat/completions", CHAT, 405),
    ("GET", "/v1/responses/resp_x?model=b", None, 404),
    ("POST", "/v1/responses/resp_x/cancel", CHAT, 404),
    ("POST", "/v1/completions", {"model": "b", "prompt": 5}, 400),
    ("POST", "/v1/chat/completions", CHAT | {"stream": True, "messages": "x"}, 400),
    ("POST", "/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": "x"}] * 9999}, 400),
    ("POST", "/v1/messages", {"model": "b"}, 400),
    ("POST", "/v1/chat/completions", CHAT | {"model": "c"}, 404),
    ("POST", "/tokenize", [1], 400),
]


def test_requests_that_no_model_would_accept_load_none(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Several(monkeypatch)
    for method, path, body, status in INVALID:
        answer = server.send(method, path, body)
        assert (answer.status_code, server.loads) == (status, []), (method, path, body, answer.text)
        assert answer.json()["error"]["message"]


def test_corpora_are_told_of_without_their_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    server = Several(monkeypatch, sessions__folder=str(tmp_path), auth__keys=KEYS)
    own = load_settings(None, {"sessions.folder": str(tmp_path / "b"), "auth.keys": KEYS})

    async def post() -> None:
        corpora = Corpora(own, lambda: "x", 9, Metrics())
        await corpora.change("alice", "A", {"path": "text"}, (), encoded, True)
        await corpora.close()

    asyncio.run(post())
    for key, names in ((ALICE, ["A"]), (BOB, [])):
        listed = server.send("GET", "/v1/outrider/corpora?model=b", key=key).json()["data"]
        assert [each["name"] for each in listed] == names
        assert not server.send("GET", "/v1/outrider/corpora?model=a", key=key).json()["data"]
    assert server.send("GET", "/v1/outrider/corpora/A?model=b", key=ALICE).json()["paths"] == ["path"]
    assert server.send("GET", "/v1/outrider/corpora/A?model=b", key=BOB).status_code == 404
    assert server.send("GET", "/v1/outrider/corpora?model=b").status_code == 401
    assert not server.loads


def test_a_valid_request_loads_its_model_once(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Several(monkeypatch)
    for _ in range(2):
        answer = server.send("POST", "/v1/chat/completions", CHAT)
        assert (answer.status_code, answer.json()["model"]) == (200, "b"), answer.text
    assert server.send("POST", "/v1/chat/completions", CHAT | {"temperature": "hot"}).status_code == 400
    large = CHAT | {"messages": [{"role": "user", "content": "x" * 100_000}], "model": "a"}
    assert server.send("POST", "/v1/chat/completions", large).json()["error"]["code"] == "context_length_exceeded"
    assert server.loads == ["b", "a"]


def test_what_ollamas_api_tells_of_models_loads_none(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Several(monkeypatch)
    assert [each["model"] for each in server.send("GET", "/api/tags").json()["models"]] == ["a:latest", "b:latest"]
    assert server.send("GET", "/api/ps").json() == {"models": []}
    assert "completion" in server.send("POST", "/api/show", {"model": "a:latest"}).json()["capabilities"]
    assert server.send("POST", "/api/show", {"model": "c"}).status_code == 404
    assert server.send("POST", "/api/pull", {"model": "b"}).json() == {"status": "success"}
    assert server.send("DELETE", "/api/delete", {"model": "b"}).status_code == 400
    assert server.send("POST", "/api/chat", {"model": "b", "messages": [], "keep_alive": "soon"}).status_code == 400
    assert not server.loads


def test_ollamas_keep_alive_is_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Several(monkeypatch)
    asked = {"model": "b:latest", "messages": CHAT["messages"], "stream": True}
    answer = server.send("POST", "/api/chat", {**asked, "keep_alive": "5m"})
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/x-ndjson")
    assert [each["name"] for each in server.send("GET", "/api/ps").json()["models"]] == ["b:latest"]
    b = server.app.state.pool.models["b"]
    assert b.idle_seconds == 300
    unloading = server.send("POST", "/api/generate", {"model": "b", "keep_alive": 0}).json()
    assert (unloading["done_reason"], b.idle_seconds) == ("unload", 0)
    older = server.send("POST", "/api/generate", {"model": "", "name": "b"}).json()
    assert (older["model"], older["done_reason"]) == ("b", "load")
    assert server.send("POST", "/v1/chat/completions", CHAT | {"keep_alive": 0}).status_code == 200
    assert b.idle_seconds == 600  # the setting's: other APIs have no such field
    assert server.loads == ["b"]


def test_a_foreign_page_loads_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    origin = "https://page.example"
    server = Several(monkeypatch, server__cors_origins=[origin])
    for site in ("cross-site", "same-site"):
        for method, path in (("GET", "/v1/outrider/corpora?model=a"), ("POST", "/v1/chat/completions")):
            answer = server.send(method, path, CHAT if method == "POST" else None, Sec_Fetch_Site=site)
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "origin_not_allowed")
    assert not server.loads
    assert server.send("GET", "/", Sec_Fetch_Site="cross-site").status_code == 200  # a link to the page
    for headers in ({"Sec_Fetch_Site": "cross-site", "Origin": origin}, {"Sec_Fetch_Site": "same-origin"}):
        assert server.send("POST", "/v1/chat/completions", CHAT, **headers).status_code == 200


def test_stored_responses_are_found_whichever_model_wrote_them(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Several(monkeypatch, auth__keys=KEYS)
    made = server.send("POST", "/v1/responses", {"model": "a", "input": "x"}, ALICE).json()
    assert server.send("POST", "/v1/responses", {"model": "b", "input": "x"}, BOB).status_code == 200
    path = f"/v1/responses/{made['id']}"
    assert server.send("GET", path, None, ALICE).json() == made
    assert server.send("GET", path, None, BOB).status_code == 404
    further = {"model": "b", "input": "y", "previous_response_id": made["id"]}
    assert server.send("POST", "/v1/responses", further, ALICE).status_code == 200
    assert server.send("DELETE", path, None, BOB).status_code == 404
    assert server.send("DELETE", path, None, ALICE).status_code == 200
    assert server.send("GET", path, None, ALICE).status_code == 404
