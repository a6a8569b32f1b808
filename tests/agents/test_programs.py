"""Agents run in folders of their own, without this user's environment, and a failed one is recorded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.agents import programs
from tests.agents.__main__ import passed, requests_of
from tests.agents.programs import Agent, agents, run
from tests.agents.script import COMMAND, FINAL_TEXT

URL = "http://127.0.0.1:1"


def install_shell(folder: Path) -> Path:
    """A shell in the place of an npm package's program."""
    binaries = folder / "node_modules" / ".bin"
    binaries.mkdir(parents=True)
    (binaries / "sh").symlink_to("/bin/sh")
    return folder


def shell(script: str) -> Agent:
    return Agent("a shell", "shell@1", ("sh", "-c", script), {"SETTING": "1"}, {"settings.json": "{}"})


def test_an_agent_that_runs_its_tool_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET", "s")
    script = f'{COMMAND}; test -e settings.json && echo "$SETTING$A_SECRET. {FINAL_TEXT}"'
    row = run(shell(script), "tools", install_shell(tmp_path / "programs"), tmp_path / "agent")
    assert row["exit_code"] == 0 and row["tool_ran"] and f"\n1. {FINAL_TEXT}" in row["output"]
    assert passed(row)
    assert passed(row | {"task": "chat", "tool_ran": False}) and not passed(row | {"task": "chat"})
    assert not passed(row | {"tool_ran": False}) and not passed(row | {"exit_code": 1}) and not passed(row | {"output": ""})


def test_the_output_names_no_folder_of_this_machine(tmp_path: Path) -> None:
    row = run(shell('pwd; echo "$HOME"'), "chat", install_shell(tmp_path / "programs"), tmp_path / "agent")
    assert row["output"].splitlines()[-2:] == ["FOLDER/work", "FOLDER/home"]


def test_an_agent_that_hangs_is_killed_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "AGENT_SECONDS", 0.2)
    row = run(shell("sleep 600 & sleep 600"), "tools", install_shell(tmp_path / "programs"), tmp_path / "agent")
    assert row["exit_code"] is None and not row["tool_ran"] and not passed(row)


def test_all_agents_ask_the_server_and_no_other() -> None:
    for agent in agents(URL, "m", 1000):
        settings = f"{agent.command} {dict(agent.environment)} {dict(agent.files)}"
        assert URL in settings and agent.package.rpartition("@")[2][0].isdigit()
        for text in agent.files.values():
            json.loads(text)


def test_requests_are_read_from_the_log() -> None:
    request = {"message": "request", "method": "POST", "route": "/v1/messages", "status": 200, "ms": 5, "principal": "local"}
    lines = ["not JSON\n", json.dumps({"message": "ready"}), json.dumps(request)]
    assert requests_of(lines) == [{"method": "POST", "route": "/v1/messages", "status": 200, "ms": 5}]
