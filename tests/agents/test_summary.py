"""The table of agents says what their runs have shown."""

from __future__ import annotations

from typing import Any

from tests.agents.summary import table


def run(task: str, *requests: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"agent": "A", "package": "@a/b@1.2", "task": task, "passed": True, "requests": list(requests)} | fields


def request(prompt_tokens: int, cached_tokens: int, **fields: Any) -> dict[str, Any]:
    given = {"route": "/v1/messages", "stream": True, "first_token_ms": 10.0 * prompt_tokens}
    return given | {"prompt_tokens": prompt_tokens, "cached_tokens": cached_tokens} | fields


def cells(*runs: dict[str, Any]) -> list[str]:
    return [cell.strip() for cell in table(runs).splitlines()[-1].strip("|").split("|")]


def test_an_agent_that_can_do_everything() -> None:
    runs = [run("chat", {"route": "/v1/models"}, request(1500, 0)), run("tools", request(1600, 1400), request(1700, 1650))]
    runs.append(run("overflow", request(9000, 0), passed=False))
    expected = ["A 1.2", "`/v1/messages`", "yes", "yes", "no", "yes", "yes", "1,650 of 1,700", "17.0", "17.00"]
    assert cells(*runs) == expected
    assert len(table([*runs, *({**each, "agent": "B"} for each in runs)]).splitlines()) == 4


def test_an_agent_that_cannot() -> None:
    chat, first = run("chat", request(1500, 0), passed=False), request(1600, 0)
    tools, overflow = run("tools", first, request(1700, 1500, stream=False), passed=False), run("overflow", passed=False)
    assert cells(chat, tools, overflow)[2:7] == ["no"] * 5
