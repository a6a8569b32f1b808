"""The validator process: replaced when a grammar has ended it, shared fairly, and never left behind."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from outrider.server.chat.grammar_job import LENIENT, GrammarJob, Structure
from outrider.server.chat.grammar_process import FATAL, Built, GrammarProcess, GrammarValidator
from outrider.server.engine import program
from outrider.server.system import is_stopped
from tests.grammars import json_grammar, reference_chain, rule_chain, terminal_chain
from tests.servers import wait_until

VALID = 'start: "a"'


@pytest.fixture
def validator() -> Iterator[GrammarValidator]:
    validator = GrammarValidator()
    yield validator
    validator.close()


def job(value: Any, kind: str = "grammar") -> GrammarJob:
    return GrammarJob(1 << 16, 1 << 16, structure=Structure(kind, value))


def validate(validator: GrammarValidator, value: Any, kind: str = "grammar") -> str:
    return asyncio.run(validator.build(job(value, kind))).reason


@pytest.mark.parametrize(
    ("bomb", "kind"),
    [(rule_chain(2900), "grammar"), (terminal_chain(3000), "grammar"), (json_grammar(reference_chain(3000)), "grammar")],
    ids=["rules", "terminals", "schema"],
)
def test_a_grammar_that_ends_the_process_is_refused_and_the_next_one_is_validated(bomb: Any, kind: str) -> None:
    validator = GrammarValidator(1 << 20)
    assert validate(validator, bomb, kind) == FATAL
    assert validate(validator, VALID) == ""
    assert "unknown name" in validate(validator, "start: b")
    validator.close()


def test_a_schema_that_ends_the_process_is_left_out_unless_it_is_strict(
    validator: GrammarValidator, monkeypatch: pytest.MonkeyPatch
) -> None:
    build, lines = GrammarProcess.build, list[str]()

    def end_at_first(process: GrammarProcess, line: str) -> Built:
        lines.append(line)
        if len(lines) == 1:
            process._process.send_signal(signal.SIGPROF)  # as its limit of processor time does
        return build(process, line)

    monkeypatch.setattr(GrammarProcess, "build", end_at_first)
    schema = {"type": "object", "maxProperties": 0}
    built = asyncio.run(validator.build(job(schema, LENIENT)))
    assert built.grammar and built.ignored == [".schema"] and len(lines) == 2
    assert asyncio.run(validator.build(job(schema, LENIENT))) == built and len(lines) == 2
    lines.clear()
    assert validate(validator, schema, "json_schema") == FATAL


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP])
def test_a_process_that_is_killed_or_stopped_says_nothing_about_the_grammar(
    validator: GrammarValidator, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    build, kills = GrammarProcess.build, [number]

    def end_first(process: GrammarProcess, line: str) -> Built:
        process._socket.settimeout(0.5 if number == signal.SIGSTOP else None)
        if kills:
            process._process.send_signal(kills.pop())
            wait_until(lambda: process.exit_code() is not None or is_stopped(process._process.pid))
        return build(process, line)

    monkeypatch.setattr(GrammarProcess, "build", end_first)
    assert validate(validator, VALID) == ""
    kills[:] = [number] * 2
    with pytest.raises(OSError, match="killed or stopped"):
        validate(validator, 'start: "b"')
    assert validate(validator, 'start: "b"') == ""


def test_many_grammars_of_one_client_delay_another_by_one_at_most(validator: GrammarValidator) -> None:
    done: list[str] = []

    async def send(number: int, principal: str) -> None:
        await validator.build(job(f'start: "{number}"'), principal)
        done.append(principal)

    async def run() -> None:
        await asyncio.gather(*(send(number, "mallory") for number in range(20)), send(20, "alice"))

    asyncio.run(run())
    assert "alice" in done[:2]


def test_the_process_ends_with_its_front_end_and_ignores_ctrl_c() -> None:
    process = GrammarProcess()
    process._process.send_signal(signal.SIGINT)
    assert process.build(job(VALID).encode()).reason == ""
    process._answers.close()
    process._socket.close()  # as if the front end had died
    assert process._process.wait(20) == 0
    process.close()


def test_a_process_that_cannot_start_is_an_error(validator: GrammarValidator, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise BlockingIOError("no more processes")

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", fail)
        with pytest.raises(OSError):
            validate(validator, VALID)
        patch.undo()
        patch.setattr(program, "command", lambda *_: ["false"])
        with pytest.raises(OSError):
            validate(validator, VALID)
    assert validate(validator, VALID) == ""
