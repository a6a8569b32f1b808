"""Parses the text of an answer into reasoning, content and tool calls."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from outrider.server.chat.tools import Part, ToolParser, merge_parts
from outrider.server.openai.generation import ChoiceOutput, Cut
from outrider.server.openai.tools.custom_input import CustomInputs


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
        """The parts that the output completes."""
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


class SingleCallParser:
    """Parses an answer up to its second call. Implements `ToolParser`."""

    def __init__(self, parser: ToolParser) -> None:
        self._parser = parser
        self.ended = False  # the second call has begun

    def feed(self, text: str) -> list[Part]:
        return self._until_second_call(self._parser.feed(text))

    def finish(self) -> list[Part]:
        return self._until_second_call(self._parser.finish())

    def _until_second_call(self, parts: Sequence[Part]) -> list[Part]:
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


class HiddenMarkers:
    """Leaves markers that are special tokens out of what a parser takes for text. Implements `ToolParser`."""

    def __init__(self, parser: ToolParser, markers: Collection[str]) -> None:
        self._parser = parser
        self._markers = re.compile("|".join(map(re.escape, sorted(markers, key=len, reverse=True))))

    @classmethod
    def around(cls, new_parser: Callable[[], ToolParser], markers: Collection[str]) -> ToolParser:
        """A new parser which hides these markers, if there are any."""
        return cls(new_parser(), markers) if markers else new_parser()

    def feed(self, text: str) -> list[Part]:
        return self._hide(self._parser.feed(text))

    def finish(self) -> list[Part]:
        return self._hide(self._parser.finish())

    def _hide(self, parts: Sequence[Part]) -> list[Part]:
        shown = [
            replace(part, text=self._markers.sub("", part.text)) if part.kind in ("content", "reasoning") else part
            for part in parts
        ]
        return [part for part in shown if part.text or part.kind == "call"]
