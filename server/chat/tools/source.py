"""The text of an answer as a parser reads it: piece by piece, as it is generated.

A parser is a generator that yields where it needs more text. A result depends on the whole text only, not on its pieces, and
reading takes time linear in the text. Knows nothing about formats.
"""

import re
from collections.abc import Callable, Collection, Generator, Sequence
from typing import TypeVar

T = TypeVar("T")
Reader = Generator[None, None, T]
Sink = Callable[[str], None]

NAME = re.compile(r"[\w.\-]+")
DIGITS = re.compile(r"[0-9]+")
SPACE = re.compile(r"\s+")
STRUCTURE = re.compile(r'["{}\[\]]')
QUOTED = re.compile(r'["\\]')
SCALAR = re.compile(r"[\w.+\-]+")


class Malformed(ValueError):
    """The text is not what the format prescribes, or it has ended."""


class Source:
    """Text that arrives in pieces. Consumed text is held until it is known to belong to a call."""

    def __init__(self) -> None:
        self.ended = False
        self._text = ""
        self._at = 0  # the text before it is consumed
        self._held: list[str] | None = None

    def feed(self, text: str) -> None:
        self._text, self._at = self._text[self._at :] + text, 0

    def hold(self, text: str = "") -> None:
        """Holds consumed text from now on, after `text`."""
        self._held = [text]

    def release(self) -> str:
        """The held text. Ends the holding."""
        held, self._held = "".join(self._held or ()), None
        return held

    @property
    def holds(self) -> bool:
        """Whether consumed text is held."""
        return self._held is not None

    def take(self, size: int) -> str:
        """Consumes characters that have arrived."""
        taken = self._text[self._at : self._at + size]
        self._at += len(taken)
        if self._held is not None:
            self._held.append(taken)
        return taken

    def peek(self) -> Reader[str]:
        """The next character; empty at the end of the answer."""
        while self._at == len(self._text) and not self.ended:
            yield
        return self._text[self._at : self._at + 1]

    def starts(self, literal: str) -> Reader[bool]:
        """Whether the text continues with `literal`."""
        while not self._text.startswith(literal, self._at):
            arrived = self._text[self._at : self._at + len(literal)]
            if self.ended or not literal.startswith(arrived):
                return False
            yield
        return True

    def match(self, literal: str) -> Reader[bool]:
        """Consumes `literal` if the text continues with it."""
        found = yield from self.starts(literal)
        if found:
            self.take(len(literal))
        return found

    def expect(self, literal: str) -> Reader[None]:
        """Consumes `literal`. Raises Malformed."""
        if not (yield from self.match(literal)):
            raise Malformed(literal)

    def one_of(self, literals: Collection[str]) -> Reader[str]:
        """Consumes one of `literals`, none of which begins another, as soon as it has arrived. Raises Malformed."""
        longest = max(map(len, literals), default=0)
        while True:
            arrived = self._text[self._at : self._at + longest]
            for literal in literals:
                if arrived.startswith(literal):
                    return self.take(len(literal))
            if self.ended or not any(literal.startswith(arrived) for literal in literals):
                raise Malformed("one of several words")
            yield

    def run(self, pattern: re.Pattern[str], sink: Sink) -> Reader[None]:
        """Consumes the characters that match `pattern`, which repeats one class of characters."""
        while (yield from self.peek()):
            found = pattern.match(self._text, self._at)
            if found is None:
                return
            sink(self.take(found.end() - found.start()))

    def word(self, pattern: re.Pattern[str] = NAME) -> Reader[str]:
        """Consumes the characters that match `pattern`; at least one. Raises Malformed."""
        taken: list[str] = []
        yield from self.run(pattern, taken.append)
        if not taken:
            raise Malformed("word")
        return "".join(taken)

    def run_space(self, sink: Sink) -> Reader[None]:
        yield from self.run(SPACE, sink)

    def skip_space(self) -> Reader[None]:
        yield from self.run_space(lambda _: None)

    def until(self, literals: Sequence[str], sink: Sink) -> Reader[str]:
        """Consumes the text before the first of `literals`, and returns that one, unconsumed; empty at the end."""
        while True:
            found = [(at, -len(each), each) for each in literals if (at := self._text.find(each, self._at)) >= 0]
            if found:
                at, _, literal = min(found)
                sink(self.take(at - self._at))
                return literal
            arrived = len(self._text) - self._at
            longest = max(map(len, literals), default=1)
            tail = self._text[max(self._at, len(self._text) - longest) :]
            pending = 0 if self.ended else max((overlap(tail, each) for each in literals), default=0)
            sink(self.take(arrived - pending))
            if self.ended:
                return ""
            yield

    def until_match(self, pattern: re.Pattern[str], sink: Sink) -> Reader[str]:
        """Consumes the text through the first match of `pattern`, one character, and returns that one. Raises Malformed."""
        while (yield from self.peek()):
            found = pattern.search(self._text, self._at)
            if found:
                sink(self.take(found.end() - self._at))
                return found[0]
            sink(self.take(len(self._text) - self._at))
        raise Malformed("the text has ended")

    def quoted(self, sink: Sink) -> Reader[None]:
        """Consumes a JSON string. Raises Malformed."""
        yield from self.expect('"')
        sink('"')
        while (yield from self.until_match(QUOTED, sink)) == "\\":
            yield from self.one(sink)

    def one(self, sink: Sink) -> Reader[None]:
        """Consumes one character. Raises Malformed."""
        if not (yield from self.peek()):
            raise Malformed("the text has ended")
        sink(self.take(1))

    def json(self, sink: Sink) -> Reader[None]:
        """Consumes a JSON value; only its brackets and quotes are checked. Raises Malformed."""
        first = yield from self.peek()
        if first == '"':
            yield from self.quoted(sink)
        elif first in ("{", "["):
            yield from self.balanced(sink)
        else:
            sink((yield from self.word(SCALAR)))

    def balanced(self, sink: Sink) -> Reader[None]:
        """Consumes a JSON object or array through its closing bracket. Raises Malformed."""
        depth = 0
        while True:
            found = yield from self.until_match(STRUCTURE, sink)
            if found == '"':
                while (yield from self.until_match(QUOTED, sink)) == "\\":
                    yield from self.one(sink)
                continue
            depth += 1 if found in "{[" else -1
            if depth == 0:
                return


def overlap(text: str, marker: str) -> int:
    """The length of the longest suffix of `text` that is a proper prefix of `marker`."""
    for size in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:size]):
            return size
    return 0
