"""The validator process: replaced when a grammar has ended it, shared fairly, and never left behind."""

import asyncio
import signal
import subprocess
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from outrider.server.chat.grammar_job import LENIENT, GrammarJob, Structure
from outrider.server.chat.grammar_process import Built, GrammarProcess
from outrider.server.chat.structured_output import FATAL, Enforced, GrammarChecker
from outrider.server.engine import program
from outrider.server.http.errors import APIError
from outrider.server.system import is_stopped
from tests.grammars import json_grammar, nested_grammars, reference_chain, rule_chain, terminal_chain
from tests.servers import wait_until

VALID = 'start: "a"'


UNAVAILABLE = "The server cannot check grammars now; try again shortly."


@pytest.fixture
def checker() -> Iterator[GrammarChecker]:
    with closing(GrammarChecker()) as checker:
        yield checker


def job(value: Any, kind: str = "grammar") -> GrammarJob:
    return GrammarJob(name="field", structure=Structure(kind, value))


def check(checker: GrammarChecker, value: Any, kind: str = "grammar") -> Enforced:
    return asyncio.run(checker.check(job(value, kind)))


def refusal(checker: GrammarChecker, value: Any, kind: str = "grammar") -> str:
    """Why a structure is refused; empty if it is accepted."""
    try:
        check(checker, value, kind)
    except APIError as error:
        return error.message.removeprefix("Invalid 'field': ")
    return ""


@pytest.mark.parametrize(
    ("bomb", "kind"),
    [
        *((bomb, "grammar") for bomb in (rule_chain(2900), terminal_chain(3000), nested_grammars(2900))),
        (json_grammar(reference_chain(3000)), "grammar"),
    ],
    ids=["rules", "terminals", "nested", "schema"],
)
def test_a_grammar_that_ends_the_process_is_refused_and_the_next_one_is_validated(bomb: Any, kind: str) -> None:
    with closing(GrammarChecker(1 << 20)) as checker:
        assert refusal(checker, bomb, kind) == FATAL
        assert refusal(checker, VALID) == ""
        assert "unknown name" in refusal(checker, "start: b")


def test_a_schema_that_ends_the_process_is_left_out_unless_it_is_strict(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    build, lines = GrammarProcess.build, list[str]()

    def end_at_first(process: GrammarProcess, line: str) -> Built:
        lines.append(line)
        if len(lines) == 1:
            process._process.send_signal(signal.SIGPROF)  # as its limit of processor time does
        return build(process, line)

    monkeypatch.setattr(GrammarProcess, "build", end_at_first)
    schema = {"type": "object", "maxProperties": 0}
    enforced = check(checker, schema, LENIENT)
    assert enforced.grammar and enforced.ignored == ["field.schema"] and len(lines) == 2
    assert check(checker, schema, LENIENT) == enforced and len(lines) == 2
    lines.clear()
    assert refusal(checker, schema, "json_schema") == FATAL


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP])
def test_a_process_that_is_killed_or_stopped_says_nothing_about_the_grammar(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    build, kills = GrammarProcess.build, [number]

    def end_first(process: GrammarProcess, line: str) -> Built:
        process._socket.settimeout(0.5 if number == signal.SIGSTOP else None)
        if kills:
            process._process.send_signal(kills.pop())
            wait_until(lambda: process.exit_code() is not None or is_stopped(process._process.pid))
        return build(process, line)

    monkeypatch.setattr(GrammarProcess, "build", end_first)
    assert refusal(checker, VALID) == ""
    kills[:] = [number] * 2
    assert refusal(checker, 'start: "b"') == UNAVAILABLE
    assert refusal(checker, 'start: "b"') == ""


async def test_many_grammars_of_one_client_delay_another_by_one_at_most(checker: GrammarChecker) -> None:
    done: list[str] = []

    async def send(number: int, principal: str) -> None:
        await checker.check(job(f'start: "{number}"'), principal)
        done.append(principal)

    await asyncio.gather(*(send(number, "mallory") for number in range(20)), send(20, "alice"))
    assert "alice" in done[:2]


def test_the_process_ends_with_its_front_end_and_ignores_ctrl_c() -> None:
    process = GrammarProcess()
    process._process.send_signal(signal.SIGINT)
    assert process.build(job(VALID).encode()).reason == ""
    process._answers.close()
    process._socket.close()  # as if the front end had died
    assert process._process.wait(20) == 0
    process.close()


def test_a_process_that_cannot_start_is_an_error(checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise BlockingIOError("no more processes")

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", fail)
        assert refusal(checker, VALID) == UNAVAILABLE
        patch.undo()
        patch.setattr(program, "command", lambda *_: ["false"])
        assert refusal(checker, VALID) == UNAVAILABLE
    assert refusal(checker, VALID) == ""
