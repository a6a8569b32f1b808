"""The parts of an answer that parsers produce, and what all parsers share: their interface, and the collection of parts."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from outrider.server.chat.tools.source import Reader, Source

# Text is read in pieces, because a search for several markers is linear in the piece for each marker that is found.
PIECE_CHARACTERS = 4096


@dataclass(frozen=True)
class Part:
    """A part of an answer: text, the name of a new call, or a fragment of a call's arguments."""

    kind: Literal["content", "reasoning", "call", "arguments"]
    text: str
    call: int = 0  # the call's number, from 0


class ToolParser(Protocol):
    """Finds tool calls in text that is being generated. The parts do not depend on how the text is cut into pieces."""

    def feed(self, text: str) -> list[Part]:
        """The parts that later text cannot change."""

    def finish(self) -> list[Part]:
        """The parts of the pending text at the end of the answer. Calls without a name are content."""


def merge_parts(parts: Sequence[Part]) -> list[Part]:
    """Joins neighbours of the same kind and call."""
    runs: list[list[Part]] = []
    for part in parts:
        if runs and part.kind != "call" and (runs[-1][0].kind, runs[-1][0].call) == (part.kind, part.call):
            runs[-1].append(part)
        else:
            runs.append([part])
    return [Part(run[0].kind, "".join(part.text for part in run), run[0].call) for run in runs]


class CallWriter:
    """Collects parts, and numbers the calls. A call that has begun owns the text that the source holds."""

    def __init__(self, source: Source) -> None:
        self.calls = 0
        self._source = source
        self._parts: list[Part] = []

    def flush(self) -> list[Part]:
        """The parts since the last time."""
        parts, self._parts = self._parts, []
        return parts

    def add(self, parts: Iterable[Part]) -> None:
        self._parts += parts

    def content(self, text: str) -> None:
        if text:
            self._parts.append(Part("content", text))

    def reasoning(self, text: str) -> None:
        if text:
            self._parts.append(Part("reasoning", text))

    def begin(self, name: str) -> None:
        """Begins a call. What has been read of it is not content."""
        self._source.release()
        self._parts.append(Part("call", name, self.calls))
        self.calls += 1

    def arguments(self, text: str) -> None:
        if text:
            self._parts.append(Part("arguments", text, self.calls - 1))


class SourceParser(ABC):
    """A `ToolParser` that reads the whole answer from a source."""

    def __init__(self) -> None:
        self._source = Source()
        self._writer = CallWriter(self._source)
        self._reader = self._read()

    @abstractmethod
    def _read(self) -> Reader[None]:
        """Reads the whole answer, and writes its parts."""

    def feed(self, text: str) -> list[Part]:
        for at in range(0, len(text), PIECE_CHARACTERS):
            self._source.feed(text[at : at + PIECE_CHARACTERS])
            next(self._reader, None)
        return merge_parts(self._writer.flush())

    def finish(self) -> list[Part]:
        self._source.ended = True
        for _ in self._reader:
            raise AssertionError("a reader waits for text after the end")
        return merge_parts(self._writer.flush())
