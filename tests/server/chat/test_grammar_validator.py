"""The validator accepts what the worker accepts, and ends at grammars that the worker would survive with a margin."""

import signal
import socket
import subprocess
import sys
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from outrider.server.chat import grammar_validator
from outrider.server.chat.grammar_job import GrammarJob, Structure
from outrider.server.chat.grammar_validator import reason, stack_bytes
from tests.grammars import json_grammar, reference_chain, rule_chain, terminal_chain

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
        ours.sendall(GrammarJob(structure=Structure("json_schema", slow)).encode().encode() + b"\n")
        assert process.wait() == -signal.SIGPROF
