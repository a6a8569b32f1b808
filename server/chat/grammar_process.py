"""The front end's side of the process that builds and validates grammars, and may die of one. Knows nothing about grammars."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import weakref
from collections.abc import Sequence
from typing import NamedTuple, TextIO

from outrider.server.engine.program import start

# A process that makes no progress gets this time. It limits its processor time itself.
ANSWER_SECONDS, START_SECONDS = 10.0, 30.0


class Built(NamedTuple):
    """A grammar in llguidance's serialization, or why there is none."""

    grammar: str = ""
    reason: str = ""
    code: str = ""  # code of the error
    ignored: Sequence[str] = ()  # names of what the grammar does not enforce


class GrammarProcess:
    """A running validator and the front end's end of the socket to it."""

    def __init__(self) -> None:
        """Starts the process; returns when it is ready. Raises OSError."""
        self._process, end = start("outrider.server.chat.grammar_validator")
        end.settimeout(START_SECONDS)
        self._socket, self._answers = end, end.makefile(encoding="ascii")
        self.close = weakref.finalize(self, close, self._process, self._socket, self._answers)
        self._read()
        end.settimeout(ANSWER_SECONDS)

    def exit_code(self, seconds: float = 0.0) -> int | None:
        """The exit code, negative for a signal's number; None if the process runs for `seconds` more."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None

    def build(self, job: str) -> Built:
        """The grammar of an encoded job. Raises OSError if the process dies or does not answer."""
        self._socket.sendall(job.encode() + b"\n")
        return self._read()

    def _read(self) -> Built:
        line = self._answers.readline()
        if not line:
            self._process.wait()
            raise ConnectionError("The process that validates grammars has ended.")
        return Built(*json.loads(line))


def close(process: subprocess.Popen[bytes], *files: socket.socket | TextIO) -> None:
    """Kills the process, waits for its end and closes the files."""
    process.kill()
    process.wait()
    for file in files:
        file.close()
