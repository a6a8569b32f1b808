"""Logs: text or JSON, with ids and times, without client text."""

import json
import logging
import sys

import pytest

from outrider.server.telemetry.logs import HumanFormatter, JsonFormatter
from tests.requests import body
from tests.servers import ALICE, Served, wait_until

SECRET = "the quick brown secret"


def record(**extra: object) -> logging.LogRecord:
    made = logging.makeLogRecord({"name": "outrider", "levelname": "INFO", "levelno": 20, "msg": "a %s", "args": ("word",)})
    made.__dict__.update(extra)
    return made


FORGED = "x\n2026-01-01 00:00:00,000 INFO outrider: forged\r\u2028\x85\x1b[2J\u202e"


@pytest.mark.parametrize("formatter", [HumanFormatter(), JsonFormatter()])
def test_a_body_cannot_forge_a_line(formatter: logging.Formatter) -> None:
    line = formatter.format(record(fields={"body": FORGED}))
    assert len(line.splitlines()) == 1 and line.isprintable()
    assert "x\\u000a2026" in line or json.loads(line)["body"] == FORGED


@pytest.mark.parametrize("formatter", [HumanFormatter(), JsonFormatter()])
def test_an_exceptions_message_cannot_forge_a_line(formatter: logging.Formatter) -> None:
    try:
        raise ValueError(FORGED)
    except ValueError:
        first, *others = formatter.format(record(exc_info=sys.exc_info())).splitlines()
    assert "a word" in first
    assert all(line.startswith("    ") and line.isprintable() for line in others)


def test_requests_are_logged_without_their_content(guarded: Served) -> None:
    headers = {"X-Request-Id": "my-request-7"}
    answer = guarded.http.post("/v1/completions", json=body(guarded, prompt=SECRET, max_tokens=12), headers=headers)
    assert answer.status_code == 200
    generated = answer.json()["choices"][0]["text"]
    errors = [
        guarded.http.post("/v1/completions", json=body(guarded, prompt=SECRET, temperature=SECRET)),
        guarded.http.post("/v1/completions", content=SECRET),
        guarded.http.get("/v1/models", headers={"Authorization": f"Bearer {ALICE}x"}),
        guarded.http.post("/v1/completions", json=body(guarded, prompt=SECRET, stop=[SECRET * 40])),
        guarded.http.post(f"/{SECRET}", json={"prompt": SECRET}, headers={"X-Request-Id": "the-last-one"}),
    ]
    assert [response.status_code for response in errors] == [400, 400, 401, 400, 404]
    # An error may quote an invalid value to its client, but never a key.
    assert all(ALICE not in response.text for response in errors)
    wait_until(lambda: any("the-last-one" in line for line in guarded.log))
    parsed = [json.loads(line) for line in guarded.log if line.startswith("{")]
    lines = {line["request_id"]: line for line in parsed if line["message"] == "request"}
    logged = "\n".join(guarded.log)
    assert SECRET not in logged and ALICE not in logged
    assert not generated.strip() or generated not in logged
    line = lines["my-request-7"]
    assert (line["route"], line["status"], line["principal"]) == ("/v1/completions", 200, "alice")
    assert 0 < line["first_token_ms"] <= line["first_byte_ms"] <= line["ms"]
    assert line["completion_tokens"] == 12
    probe = next(line for line in lines.values() if line["route"] == "/ready")
    assert (line["level"], probe["level"]) == ("info", "debug")
    assert (lines["the-last-one"]["route"], lines["the-last-one"]["status"]) == ("other", 404)
