"""Logs: JSON or for people, with ids and times, and nothing of what clients send."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import httpx
import pytest

from server.telemetry.logs import HumanFormatter, JsonFormatter
from tests.integration.conftest import Served, serving
from tests.integration.test_server import body

KEY, SECRET = "a-key-that-nobody-must-see", "the quick brown secret"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    config = tmp_path_factory.mktemp("keys") / "config.yaml"
    config.write_text(f"auth: {{keys: {{tester: {KEY}}}}}\nlogging: {{format: json, level: debug}}\n")
    with serving("--config", str(config), key=KEY) as server:
        yield server


def record(**extra: object) -> logging.LogRecord:
    made = logging.makeLogRecord({"name": "outrider", "levelname": "INFO", "levelno": 20, "msg": "a %s", "args": ("word",)})
    made.__dict__.update(extra)
    return made


def test_a_line_is_an_object() -> None:
    line = json.loads(JsonFormatter().format(record(fields={"ms": 3.5})))
    assert (line["message"], line["level"], line["ms"]) == ("a word", "info", 3.5)
    assert HumanFormatter().format(record(fields={"ms": 3.5})).endswith("INFO outrider: a word ms=3.5")


def test_requests_are_logged_and_what_they_say_is_not(guarded: Served) -> None:
    asked = {"X-Request-Id": "my-request-7"}
    answer = guarded.http.post("/v1/completions", json=body(guarded, prompt=SECRET, max_tokens=3), headers=asked)
    assert answer.status_code == 200
    said = answer.json()["choices"][0]["text"]
    wrong = [
        guarded.http.post("/v1/completions", json=body(guarded, prompt=SECRET, temperature=SECRET)),
        guarded.http.post("/v1/completions", content=SECRET),
        guarded.http.post(f"/{SECRET}", json={"prompt": SECRET}),
        guarded.http.get("/v1/models", headers={"Authorization": f"Bearer {KEY}x"}),
        guarded.http.post("/v1/completions", json=body(guarded, prompt=SECRET, stop=[SECRET * 40])),
    ]
    assert [response.status_code for response in wrong] == [400, 400, 404, 401, 400]
    # An error may quote a wrong value to the client that sent it; no key is ever said.
    assert all(KEY not in response.text for response in wrong)
    guarded.process.terminate()
    guarded.process.wait(60)
    lines = [json.loads(line) for line in guarded.log if line.startswith("{")]
    logged = "\n".join(guarded.log)
    assert SECRET not in logged and KEY not in logged
    assert not said.strip() or said not in logged
    mine = next(line for line in lines if line.get("request_id") == "my-request-7")
    assert (mine["route"], mine["status"], mine["principal"]) == ("/v1/completions", 200, "tester")
    assert 0 < mine["first_token_ms"] <= mine["first_byte_ms"] <= mine["ms"]
    assert mine["completion_tokens"] == 3
    assert [line["status"] for line in lines if line["message"] == "request" and line.get("route") == "other"] == [404]


def test_prompts_are_logged_where_the_owner_wants_it() -> None:
    with serving("--logging.prompts", "true") as server:
        server.http.post("/v1/completions", json=body(server, prompt=SECRET, max_tokens=1))
        httpx.get(f"{server.url}/health")
    assert any(SECRET in line for line in server.log)
    assert not any("/health" in line for line in server.log)
