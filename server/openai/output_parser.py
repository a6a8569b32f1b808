"""Parses the text of an answer into reasoning, content and tool calls, and these into the items of some APIs' answers."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

from outrider.server.chat.tools import Part, ToolParser, merge_parts
from outrider.server.http.sse import ServerSentEvent
from outrider.server.openai.generation import ChoiceOutput, Cut, Formatter
from outrider.server.openai.tools.custom_input import CustomInputs
from outrider.server.openai.usage import Usage


class OutputParser:
    """Parses the outputs of all choices of one answer, and counts their reasoning tokens."""

    def __init__(self, new_parser: Callable[[], ToolParser], custom_tools: Collection[str] = ()) -> None:
        """`new_parser` is called once per choice. Calls of `custom_tools` become `CustomPart`."""
        self._new_parser = new_parser
        self._custom_tools = custom_tools
        self._inputs: dict[int, CustomInputs] = {}
        self._parsers: dict[int, ToolParser] = {}
        self.reasoning_tokens = 0

    def parse(self, output: ChoiceOutput) -> list[Part]:
        if output.index not in self._parsers:
            self._parsers[output.index] = self._new_parser()
            self._inputs[output.index] = CustomInputs(self._custom_tools)
        parser = self._parsers[output.index]
        parts: list[Part] = []
        for text, tokens in output.pieces:
            new = parser.feed(text)
            if new and all(part.kind == "reasoning" for part in new):
                self.reasoning_tokens += tokens
            parts += new
        finished = output.finish is not None
        merged = merge_parts(parts + (parser.finish() if finished else []))
        return self._inputs[output.index].convert(merged, finished)


class ItemsFormatter(Formatter, ABC):
    """The format of an answer that is a list of items, each a text, reasoning or a call, of which the last one grows.

    Subclasses write the items, and the events that build them, in the words of their API.
    """

    def __init__(
        self,
        answer: dict[str, Any],
        items: list[dict[str, Any]],
        new_parser: Callable[[], ToolParser],
        custom_tools: Collection[str] = (),
    ) -> None:
        """`items` is the list in `answer`."""
        self.answer = answer
        self._items = items
        self._parser = OutputParser(new_parser, custom_tools)
        self._open = ""  # the kind of parts that the last item takes; empty if it is complete

    def body(self, outputs: Sequence[ChoiceOutput], usage: Usage) -> dict[str, Any]:
        for output in outputs:
            for each in output.split():  # so that log-probabilities are added to the item of their text
                self.deltas(each)
        self.end(usage)
        return self.answer

    @abstractmethod
    def _begin_item(self, part: Part) -> list[ServerSentEvent]:
        """Appends the item that a part begins, without the part's text unless that is the name of a call."""

    @abstractmethod
    def _append(self, text: str) -> list[ServerSentEvent]:
        """Appends text or arguments to the last item."""

    @abstractmethod
    def _end_item(self, is_whole: bool) -> list[ServerSentEvent]:
        """Completes the last item; it is whole unless a limit has cut it."""

    def _write(self, parts: Sequence[Part]) -> list[ServerSentEvent]:
        events: list[ServerSentEvent] = []
        for part in parts:
            kind = "arguments" if part.kind == "call" else part.kind
            if part.kind == "call" or kind != self._open:
                events += self._close() + self._begin_item(part)
                self._open = kind
            if part.kind != "call":
                events += self._append(part.text)
        return events

    def _close(self, is_whole: bool = True) -> list[ServerSentEvent]:
        """Completes the last item if it is not complete."""
        was_open, self._open = bool(self._open), ""
        return self._end_item(is_whole) if was_open else []

    @property
    def _item(self) -> dict[str, Any]:
        return self._items[-1]

    @property
    def _index(self) -> int:
        return len(self._items) - 1


class FilteredParser(ABC):
    """Filters what another parser finds. Implements `ToolParser`."""

    def __init__(self, parser: ToolParser) -> None:
        self._parser = parser

    def feed(self, text: str) -> list[Part]:
        return self._filter(self._parser.feed(text))

    def finish(self) -> list[Part]:
        return self._filter(self._parser.finish())

    @abstractmethod
    def _filter(self, parts: Sequence[Part]) -> list[Part]: ...


class SingleCallParser(FilteredParser):
    """Parses an answer up to its second call."""

    ended = False  # the second call has begun

    def _filter(self, parts: Sequence[Part]) -> list[Part]:
        end = 0 if self.ended else next((at for at, part in enumerate(parts) if part.kind == "call" and part.call > 0), None)
        self.ended = end is not None
        return list(parts[:end])


class SingleCallStop:
    """Ends a choice where its second call begins. Implements `outrider.server.openai.generation.Stop`."""

    def __init__(self, parser: ToolParser) -> None:
        self._parser = SingleCallParser(parser)

    def feed(self, text: str) -> Cut | None:
        self._parser.feed(text)
        return Cut(len(text), "stop") if self._parser.ended else None


class HiddenMarkers(FilteredParser):
    """Leaves markers that are special tokens, if any, out of what a parser takes for text."""

    def __init__(self, parser: ToolParser, markers: Collection[str]) -> None:
        super().__init__(parser)
        self._markers = re.compile("|".join(map(re.escape, sorted(markers, key=len, reverse=True))) or "(?!)")

    def _filter(self, parts: Sequence[Part]) -> list[Part]:
        shown = [
            replace(part, text=self._markers.sub("", part.text)) if part.kind in ("content", "reasoning") else part
            for part in parts
        ]
        return [part for part in shown if part.text or part.kind == "call"]
