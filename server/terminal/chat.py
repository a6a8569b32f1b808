"""The chat: reads questions and commands, shows answers. Ctrl-C stops an answer, Ctrl-D ends the chat."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from outrider.drafters.options import NAMES
from outrider.server.terminal.answer import Answer
from outrider.server.terminal.client import ChatError, Client
from outrider.server.terminal.wrapping import Wrapper

HELP = """\
/drafter [NAME]  show or choose the drafter; `default` is the server's
/seed [NUMBER]   show or set the seed, which repeats answers; `none` draws a new one for each answer
/again           drop the last answer and ask for another one
/clear           start a new conversation
/stats           speed and accepted drafts of the last answer
/help            show this list
Ctrl-C stops an answer, Ctrl-D ends the chat."""


@dataclass
class Chat:
    """A conversation with a model."""

    client: Client
    model: str
    check: Callable[[], None] = lambda: None  # raises ChatError if the chat cannot go on
    drafter: str | None = None  # None = the server's
    seed: int | None = None
    messages: list[dict[str, str]] = field(default_factory=list)
    last: Answer | None = None
    session: str = field(default_factory=lambda: uuid.uuid4().hex)

    def run(self, read: Callable[[], str]) -> None:
        """Reads lines until EOFError. Raises ChatError if the chat cannot go on."""
        while True:
            try:
                self.check()
                line = read()
                if line.startswith("/"):
                    self.command(line)
                elif line.strip():
                    self.ask(line.strip())
            except KeyboardInterrupt:
                show("\n")
            except EOFError:
                return

    def command(self, line: str) -> None:
        """Runs a command, and shows its result."""
        name, _, argument = line[1:].partition(" ")
        commands: dict[str, Callable[[str], str]] = {
            "drafter": self._set_drafter,
            "seed": self._set_seed,
            "again": self._again,
            "clear": self._clear,
            "stats": lambda _: self.last.stats() if self.last else "There is no answer yet.",
            "help": lambda _: HELP,
        }
        if name in commands:
            result = commands[name](argument.strip())
        else:
            result = f"There is no command /{name}; /help lists them, and a leading space sends the line as a question."
        show(f"{result}\n" if result else "")

    def ask(self, question: str) -> None:
        """Asks, and shows the answer. A question without any answer is not part of the conversation."""
        self.messages.append({"role": "user", "content": question})
        self.last = answer = Answer(show, wrapper=new_wrapper())
        note = ""
        try:
            with contextlib.closing(self.client.stream(self._body())) as chunks:
                answer.receive(chunks)
        except KeyboardInterrupt:
            note = "(stopped)\n"
        except ChatError as error:
            note = f"outrider: {error}\n"
        show(("\n" if answer.text or not note else "") + note)
        if answer.text or not note:
            self.messages.append({"role": "assistant", "content": answer.text})
        else:
            self.messages.pop()

    def _body(self) -> dict[str, Any]:
        speculation: dict[str, Any] = {"report": True}
        if self.drafter:
            speculation["drafter"] = self.drafter
        seed = {} if self.seed is None else {"seed": self.seed}
        return seed | {
            "model": self.model,
            "messages": self.messages,
            "session_id": self.session,
            "stream_options": {"include_usage": True},
            "speculation": speculation,
        }

    def _set_drafter(self, name: str) -> str:
        if name and name not in (*NAMES, "default"):
            return f"There is no drafter {name!r}; choose one of {', '.join(NAMES)}, or default."
        if name:
            self.drafter = None if name == "default" else name
        return f"The drafter is {self.drafter or 'the default of the server'}."

    def _set_seed(self, number: str) -> str:
        try:
            if number:
                self.seed = None if number == "none" else int(number)
        except ValueError:
            return f"The seed is a number or none, not {number!r}."
        return "Each answer draws a new seed." if self.seed is None else f"The seed is {self.seed}."

    def _again(self, _: str) -> str:
        questions = [number for number, message in enumerate(self.messages) if message["role"] == "user"]
        if not questions:
            return "There is no question yet."
        question = self.messages[questions[-1]]["content"]
        del self.messages[questions[-1] :]
        self.ask(question)
        return ""

    def _clear(self, _: str) -> str:
        self.messages.clear()
        return "This is a new conversation."


def show(text: str) -> None:
    """Writes to the terminal at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def new_wrapper() -> Wrapper | None:
    """Breaks lines if the answer is written to a terminal that can erase."""
    if not sys.stdout.isatty() or os.environ.get("TERM", "dumb") == "dumb":
        return None
    return Wrapper(lambda: shutil.get_terminal_size().columns)


def line_reader() -> Callable[[], str]:
    """Reads lines: with a prompt and editing on a terminal, plainly from a file or pipe. Raises EOFError."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return input
    with contextlib.suppress(ImportError):  # some builds of Python have no readline
        import readline  # noqa: F401
    return lambda: input("> ")
