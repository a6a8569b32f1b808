"""A run sends all requests, kills the worker as often as it should, and ends when the server does."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import deque
from subprocess import PIPE, Popen
from typing import Any

import httpx
import pytest

from bench.hostile import attack, kills, stores
from bench.hostile.answers import Answer
from bench.hostile.attack import Attack, Record
from bench.http.process import ServerProcess
from tests.bench.hostile.targets import target


@pytest.fixture(autouse=True)
def answered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every request is answered with a 200 at once; returns the paths."""
    paths: list[str] = []

    async def read(client: httpx.AsyncClient, method: str, path: str, on_data: Any = lambda: None, **_: Any) -> Answer:
        paths.append(path)
        on_data()
        await asyncio.sleep(0)
        return Answer("200")

    for module in (attack, kills, stores):
        monkeypatch.setattr(module, "read", read)
    return paths


def run(program: str, requests: int, kill_count: int) -> Attack:
    """An attack on a process that runs `program`."""
    with Popen([sys.executable, "-c", program], stdin=PIPE, stderr=PIPE, text=True) as process:
        made = Attack(target(), ServerProcess("http://127.0.0.1:1", process, deque()), requests, kill_count, seed=0)
        if not program:
            process.wait(30)
        asyncio.run(made.run())
        process.communicate()
    return made


def test_all_requests_are_sent_and_counted(answered: list[str]) -> None:
    record = run("input()", 400, 0).record
    sent = sum(sum(counts.values()) for kind, counts in record.statuses.items() if kind not in ("bystander", "fill"))
    assert sent == 400
    assert {"malformed", "broken", "held: silent", "grammar", "list"} <= set(record.statuses)
    assert record.statuses["bystander"]["200"] >= 1
    assert not record.kills
    assert {"statuses", "milliseconds", "bad", "kills"} <= set(record.figures())


def test_the_worker_is_killed_as_often_as_it_should_be(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[int] = []
    monkeypatch.setattr(kills, "find_worker", lambda process_id: 1234)
    monkeypatch.setattr(os, "kill", lambda process_id, _: killed.append(process_id))
    record = run("input()", 50, 3).record
    assert killed == [1234] * 3 and record.kills == 3
    assert {"killed mid-stream", "killed mid-prefill", "killed mid-grammar"} <= set(record.statuses)


def test_the_run_ends_with_the_server(answered: list[str]) -> None:
    run("", 400, 0)
    assert len(answered) <= 1  # the bystander's


def test_memory_is_judged_once_the_stores_are_full(monkeypatch: pytest.MonkeyPatch, answered: list[str]) -> None:
    filled_after: list[int] = []

    async def fill(*_: object) -> None:
        filled_after.append(len(answered))

    monkeypatch.setattr(attack, "fill_stores", fill)
    forgotten: list[bool] = []
    monkeypatch.setattr(Record, "forget_memory", lambda record: forgotten.append(True))
    run("input()", 400, 0)
    assert forgotten == [True]
    assert len(filled_after) == 1 and 0 < filled_after[0] < len(answered)


def test_a_store_that_is_not_filled_fails_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: object, **__: object) -> Answer:
        return Answer("400", "too_long", text="The prompt is too long.")

    assert run("input()", 20, 0).record.bad == []
    monkeypatch.setattr(stores, "read", refuse)
    record = run("input()", 20, 0).record
    assert record.statuses["fill"] == {"400": len(record.bad)}
    assert record.bad[0] == "fill: 400 too_long: The prompt is too long. (POST /v1/responses)"


def test_bad_answers_are_described() -> None:
    record = Record(memory={"worker": [1.0]})
    record.forget_memory()
    assert record.memory == {"worker": []}
    record.add("list", Answer("500", text="oh"), 0.0, True, "POST /")
    record.add("list", Answer("400"), 0.0, True, "POST /")
    assert record.bad == ["list: 500 : oh (POST /)"]
    assert record.statuses["list"] == {"500": 1, "400": 1}


def test_a_bystander_that_gets_another_answer_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    async def read(client: httpx.AsyncClient, method: str, path: str, on_data: Any = lambda: None, **_: Any) -> Answer:
        on_data()
        await asyncio.sleep(0)
        text = "wrong" if path.startswith("http://other") else "right"
        return Answer("200", text=json.dumps({"choices": [{"text": text}]}))

    for module in (attack, kills, stores):
        monkeypatch.setattr(module, "read", read)
    monkeypatch.setattr(attack, "BYSTANDER_SECONDS", 0.0)
    with Popen([sys.executable, "-c", "input()"], stdin=PIPE, stderr=PIPE, text=True) as process:
        server = ServerProcess("http://127.0.0.1:1", process, deque())
        made = Attack(target(), server, 200, 0, seed=0, answers={"x": "right"}, others=["http://other"])
        asyncio.run(made.run())
        process.communicate()
    wrong = [each for each in made.record.bad if each.startswith("bystander")]
    assert wrong and all("'wrong' for 'right'" in each and "http://other" in each for each in wrong)
