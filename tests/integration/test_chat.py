"""`outrider chat` in a real terminal, with a running server."""

import os
import pty
import re
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from outrider import models
from tests.hub import MODEL, serving_hub
from tests.servers import WAIT_SECONDS, Served, children

PROMPT = "\n> "
QUESTION = "Write a Python function that reads a file."
SHORT, LONG = 4, 11  # seeds with which the answer has 41 tokens, and fills the context


class Terminal:
    def __init__(self, process_id: int, descriptor: int) -> None:
        self.process_id = process_id
        self._descriptor = descriptor
        self._output = ""

    def type(self, text: str) -> None:
        """Presses keys."""
        os.write(self._descriptor, text.encode())

    def wait(self, ends: Callable[[str], bool]) -> str:
        """The output up to where `ends` holds for it. Raises TimeoutError."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not ends(self._output):
            if time.monotonic() > deadline:
                raise TimeoutError(self._output)
            if select.select([self._descriptor], [], [], 1)[0]:
                try:
                    self._output += os.read(self._descriptor, 1 << 16).decode(errors="replace").replace("\r\n", "\n")
                except OSError:  # the program has ended
                    break
        output, self._output = self._output, ""
        return output

    def wait_for_prompt(self) -> str:
        """The output before the next prompt."""
        return self.wait(lambda output: output.endswith(PROMPT)).removesuffix(PROMPT)

    def enter(self, line: str) -> str:
        self.type(line + "\n")
        return self.wait_for_prompt().removeprefix(line + "\n")

    def exit_code(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.process_id, 0)[1])


@contextmanager
def terminal(home: Path, *arguments: str, **environment: str) -> Iterator[Terminal]:
    process_id, descriptor = pty.fork()
    if process_id == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a run in the background ignores it, which is inherited
        program = [sys.executable, "-m", "outrider.server.cli", "chat", *arguments]
        os.execve(sys.executable, program, {**os.environ, "HOME": str(home), "TERM": "dumb", **environment})
    try:
        yield Terminal(process_id, descriptor)
    finally:
        os.close(descriptor)  # the terminal hangs up, which ends the chat


@pytest.fixture
def chat(served: Served, tmp_path: Path) -> Iterator[Terminal]:
    """A chat with the shared server."""
    with terminal(tmp_path, "--url", served.url) as window:
        assert served.model in window.wait_for_prompt()
        yield window


def test_an_answer_is_shown_and_repeated_by_its_seed(chat: Terminal) -> None:
    assert chat.enter(f"/seed {SHORT}") == f"The seed is {SHORT}."
    first = chat.enter(QUESTION)
    assert len(first) > 10
    assert re.search(r"^\d+ tokens in .*^\d+ steps, ", chat.enter("/stats"), re.S | re.M)
    assert "none" in chat.enter("/drafter none")
    assert chat.enter("/again") == first
    chat.enter("/clear")
    assert chat.enter(QUESTION) == first
    chat.type("\x04")
    assert chat.exit_code() == 0


def test_ctrl_c_stops_the_answer_and_not_the_chat(chat: Terminal, served: Served) -> None:
    chat.enter("/drafter none")
    chat.enter(f"/seed {LONG}")
    chat.type(f"{QUESTION}\n")
    chat.wait(lambda output: output.count("\n") >= 2)  # the question, and a line of the answer
    chat.type("\x03")
    assert chat.wait_for_prompt().endswith("(stopped)")
    assert "stopped" in chat.enter("/stats")
    chat.enter("/clear")
    chat.enter(f"/seed {SHORT}")
    assert len(chat.enter(QUESTION)) > 10
    chat.type("\x04")
    assert chat.exit_code() == 0


@pytest.mark.slow
def test_a_chat_with_a_model_of_the_hub_starts_and_ends_its_server(tmp_path: Path) -> None:
    """The download of a pinned revision is shown, the model answers, and closing the terminal ends the server."""
    flags = ["--model", MODEL, "--model.revision", "v1", "--model.dtype", "float32", "--model.threads", "1"]
    flags += ["--seed", str(SHORT)]
    with serving_hub({"v1": Path(models.TARGET)}, pause_seconds=1.5) as (url, asked):
        environment = {"HF_ENDPOINT": url, "HF_HOME": str(tmp_path / "hub")}
        with terminal(tmp_path, *flags, **environment) as window:
            shown = window.wait_for_prompt()
            servers = children(window.process_id)
            assert len(window.enter(QUESTION)) > 10
    assert shown.count(f"downloading {MODEL}: ") == 2  # in part, and complete
    assert "HTTP Request" not in shown
    assert not any("/resolve/main" in path for path in asked)
    assert window.exit_code() == 128 + signal.SIGHUP
    assert servers
    assert not any(Path(f"/proc/{server}").exists() for server in servers)
