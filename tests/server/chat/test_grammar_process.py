"""The validator process: it accepts what the worker accepts, is replaced when a grammar ends it, and is shared fairly."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from outrider.server.chat import grammar_validator
from outrider.server.chat.grammar_job import LENIENT, GrammarJob, Structure, decode_built, encode
from outrider.server.chat.grammar_validator import reason, stack_bytes
from outrider.server.chat.structured_output import FATAL, MODULE, Enforced, GrammarChecker
from outrider.server.engine import program
from outrider.server.engine.helper import BlockingHelper
from outrider.server.engine.transport import Frames, framed
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
    ask, lines = BlockingHelper.ask, list[bytes]()

    def end_at_first(process: BlockingHelper, line: bytes, seconds: float) -> bytes:
        lines.append(line)
        if len(lines) == 1:
            ask(process, line, seconds)
            os.kill(process.pid, signal.SIGPROF)  # as its limit of processor time does
        return ask(process, line, seconds)

    monkeypatch.setattr(BlockingHelper, "ask", end_at_first)
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
    ask, kills = BlockingHelper.ask, [number]

    def end_first(process: BlockingHelper, line: bytes, seconds: float) -> bytes:
        if not kills:
            return ask(process, line, seconds)
        os.kill(process.pid, kills.pop())
        wait_until(lambda: not process.alive or is_stopped(process.pid))
        return ask(process, line, 0.1)

    monkeypatch.setattr(BlockingHelper, "ask", end_first)
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
    process, end = program.start(MODULE)
    with end:
        for _ in range(2):  # it ignores the signal once it runs
            end.sendall(framed(encode(job(VALID))))
            [answer] = Frames().feed(end.recv(1 << 16))
            assert decode_built(answer).reason == ""
            os.kill(process.pid, signal.SIGINT)
    assert process.wait(20) == 0  # as if the front end had died


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


BYTES = LLTokenizer("byte")


@pytest.mark.parametrize(
    ("grammar", "expected"),
    [
        ("start: b", "unknown name"),
        ("start: (", "Expected"),
        (json_grammar({"type": "array", "uniqueItems": True}), "uniqueItems"),
        ("start: " + " | ".join(f'"w{i}"' for i in range(3000)), "items"),
        (LLMatcher.grammar_from_regex("(" * 30 + "a" + "){2}" * 30), "too many"),
    ],
)
def test_invalid_and_expensive_grammars_have_a_reason(grammar: str, expected: str) -> None:
    assert expected in reason(grammar, BYTES)


def compiles(grammar: str, stack: int) -> bool:
    """Whether a new process compiles the grammar and computes a mask in a thread with a stack of this size."""
    program = (
        "import sys, threading\n"
        "from llguidance import LLMatcher, LLTokenizer\n"
        "from outrider.verify.constraints.limits import LIMITS\n"
        "grammar = sys.stdin.read()\n"
        "def compile():\n"
        "    matcher = LLMatcher(LLTokenizer('byte'), grammar, log_level=0, limits=LIMITS)\n"
        "    assert not matcher.is_error(), matcher.get_error()\n"
        "    matcher.deep_copy().compute_bitmask()\n"
        f"threading.stack_size({stack})\n"
        "thread = threading.Thread(target=compile)\n"
        "thread.start()\n"
        "thread.join()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], input=grammar, capture_output=True, text=True)
    assert done.returncode in (0, -signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS) and not done.stderr, done.stderr
    return done.returncode == 0


def references(link: str) -> Any:
    return lambda size: json_grammar(reference_chain(size, link))


@pytest.mark.parametrize(
    ("bomb", "refused"), [(rule_chain, 800), (terminal_chain, 1000), (references("$ref"), 800), (references("properties"), 300)]
)
def test_what_the_validator_survives_leaves_the_worker_a_margin(bomb: Any, refused: int) -> None:
    """The smallest grammars that end the validator need less than half of the worker's stack of 8 MB."""
    assert stack_bytes() <= 2 << 20
    assert not compiles(bomb(refused), stack_bytes())
    assert compiles(bomb(refused), 4 << 20)


def test_a_grammar_that_takes_too_long_ends_the_process() -> None:
    program = f"from {grammar_validator.__name__} import *\nimport {grammar_validator.__name__} as v\nv.CPU_SECONDS = 0.01\n"
    ours, theirs = socket.socketpair()
    with ours, theirs:
        program += f"v.main('{theirs.fileno()}')"
        process = subprocess.Popen([sys.executable, "-c", program], pass_fds=[theirs.fileno()])
        theirs.close()
        slow = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(2000)}}
        ours.sendall(framed(encode(GrammarJob(structure=Structure("json_schema", slow)))))
        assert process.wait() == -signal.SIGPROF
