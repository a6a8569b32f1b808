"""The chat: reads questions and commands, shows answers and what they cost. Ctrl-C stops an answer, Ctrl-D ends the chat."""

import contextlib
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.drafters.options import NAMES
from outrider.server.terminal.client import NO_CHUNK, ChatError, Client, printable

# These exceptions are raised for fields that are missing or of another type.
MALFORMED = (LookupError, TypeError, AttributeError, ValueError)


@dataclass
class Answer:
    """The answer to one question, so far."""

    write: Callable[[str], None]  # shows text at once
    clock: Callable[[], float] = time.monotonic
    text: str = ""  # text without reasoning
    first_seconds: float | None = None  # time from the question to the first text
    seconds: float = 0.0  # time from the question to the end
    usage: dict[str, Any] = field(default_factory=dict)
    speculation: dict[str, Any] = field(default_factory=dict)

    def receive(self, chunks: Iterator[dict[str, Any]]) -> None:
        """Shows the chunks as they arrive. Raises ChatError, what `chunks` raises, and KeyboardInterrupt."""
        asked = self.clock()
        try:
            for chunk in chunks:
                for content, shown in self._read(chunk):
                    if shown and self.first_seconds is None:
                        self.first_seconds = self.clock() - asked
                    self.text += content
                    self._show(shown)
        finally:
            self.seconds = self.clock() - asked

    def stats(self) -> str:
        if not self.usage:
            return f"The answer was stopped after {self.seconds:.2f} s."
        try:
            return printable(self._figures())
        except MALFORMED:
            return f"The answer took {self.seconds:.2f} s; the server reports its cost in a form that the chat cannot read."

    def _read(self, chunk: dict[str, Any]) -> list[tuple[str, str]]:
        """The text of each choice: the part that belongs to the answer, and the part to show. Raises ChatError."""
        texts = []
        try:
            for choice in chunk["choices"]:
                content, reasoning = (str(choice["delta"].get(name) or "") for name in ("content", "reasoning_content"))
                texts.append((content, content or reasoning))
        except MALFORMED:
            raise ChatError(NO_CHUNK) from None
        self.usage = chunk.get("usage") or self.usage
        self.speculation = chunk.get("speculation") or self.speculation
        return texts

    def _figures(self) -> str:
        tokens = self.usage["completion_tokens"]
        lines = [
            f"{tokens} tokens in {self.seconds:.2f} s, {tokens / max(self.seconds, 1e-6):.0f} tokens/s, "
            f"first text after {1e3 * (self.first_seconds or self.seconds):.0f} ms",
            f"{self.usage['prompt_tokens']} prompt tokens, "
            f"{(self.usage.get('prompt_tokens_details') or {}).get('cached_tokens', 0)} of them cached",
        ]
        if self.speculation:
            accepted, drafted = self.speculation["accepted_tokens"], self.speculation["drafted_tokens"]
            shares = [f"{source} {accepted.get(source, 0)} of {count}" for source, count in drafted.items()]
            lines.append(f"{self.speculation['steps']} steps, {self.speculation['mean_tokens_per_step']:.2f} tokens per step")
            lines.append(f"accepted drafts: {', '.join(shares) or 'nothing was drafted'}")
        return "\n".join(lines)

    def _show(self, text: str) -> None:
        shown = printable(text)
        if shown:
            self.write(shown)


HELP = """\
/drafter [NAME]  show or choose the drafter; `default` is the server's
/seed [NUMBER]   show or set the seed, which repeats answers; `none` draws a new one for each answer
/edit FILE TEXT  ask for a change of a file; its text is sent, also as the predicted output
/again           drop the last answer and ask for another one
/clear           start a new conversation
/stats           speed and accepted drafts of the last answer
/help            show this list
Ctrl-C stops an answer, Ctrl-D ends the chat."""


@dataclass
class Chat:
    client: Client
    model: str
    check: Callable[[], None] = lambda: None  # raises ChatError if the chat cannot go on
    drafter: str | None = None  # None = the server's
    seed: int | None = None
    messages: list[dict[str, str]] = field(default_factory=list)
    last: Answer | None = None
    expected: str | None = None  # predicted output of the last question
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
        name, _, argument = line[1:].partition(" ")
        commands: dict[str, Callable[[str], str]] = {
            "drafter": self._set_drafter,
            "seed": self._set_seed,
            "edit": self._edit,
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

    def ask(self, question: str, expected: str | None = None) -> None:
        """Asks, and shows the answer. A question without any answer is not part of the conversation.

        If the client expects an answer like the text `expected`, parts of it that the answer repeats come faster.
        """
        self.messages.append({"role": "user", "content": question})
        self.expected = expected
        self.last = answer = Answer(show)
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
        fields: dict[str, Any] = {} if self.seed is None else {"seed": self.seed}
        if self.expected is not None:
            fields["prediction"] = {"type": "content", "content": self.expected}
        return fields | {
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

    def _edit(self, argument: str) -> str:
        name, _, change = argument.partition(" ")
        if not change:
            return "Name a file and the change, such as /edit main.py Rename the function run to start."
        try:
            text = Path(name).expanduser().read_text()
        except (OSError, ValueError) as error:
            return f"The file cannot be read: {error}."
        fence = "```" if "```" not in text else "~~~~"
        self.ask(f"{change.strip()}\n\nAnswer with the whole file and nothing else.\n\n{fence}\n{text}\n{fence}", text)
        return ""

    def _again(self, _: str) -> str:
        questions = [number for number, message in enumerate(self.messages) if message["role"] == "user"]
        if not questions:
            return "There is no question yet."
        question = self.messages[questions[-1]]["content"]
        del self.messages[questions[-1] :]
        self.ask(question, self.expected)
        return ""

    def _clear(self, _: str) -> str:
        self.messages.clear()
        return "This is a new conversation."


def show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def line_reader() -> Callable[[], str]:
    """Reads lines: with a prompt and editing on a terminal, plainly from a file or pipe. Raises EOFError."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return input
    with contextlib.suppress(ImportError):  # some builds of Python have no readline
        import readline  # noqa: F401
    return lambda: input("> ")
