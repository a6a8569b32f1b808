"""Converts a custom tool's function arguments to the tool's input, while they are generated."""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from outrider.server.chat.grammar_job import INPUT
from outrider.server.chat.tools import Part
from outrider.server.http import json_body

OPENING = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
# Arguments that do not open with the input within this many characters are read as a whole.
OPENING_CHARACTERS = 64
# Complete characters of a JSON string. Models also write escapes that JSON does not have.
CHARACTERS = re.compile(r'(?:[^"\\]|\\u[0-9a-fA-F]{4}|\\u(?=[0-9a-fA-F]{0,3}[^0-9a-fA-F])|\\[^u])*', re.DOTALL)
ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|.)", re.DOTALL)
ESCAPED = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
SURROGATES = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class CustomPart(Part):
    """A part of a custom tool's call: its name, or a fragment of its input as kind "arguments"."""


class CustomInputs:
    """Converts the calls of custom tools in one answer."""

    def __init__(self, names: Collection[str]) -> None:
        """`names` are those of the custom tools."""
        self._names = names
        self._decoder: InputDecoder | None = None  # decoder of the call in progress
        self._call = 0

    def convert(self, parts: Sequence[Part], finished: bool) -> list[Part]:
        """The parts, with calls of custom tools as `CustomPart`. `finished`: no further parts follow."""
        converted: list[Part] = []
        for part in parts:
            if part.kind == "arguments" and self._decoder is not None:
                converted += self._input(self._decoder.feed(part.text))
                continue
            converted += self._end()
            if part.kind == "call" and part.text in self._names:
                self._decoder, self._call = InputDecoder(), part.call
                part = CustomPart("call", part.text, part.call)
            converted.append(part)
        return converted + (self._end() if finished else [])

    def _end(self) -> list[Part]:
        decoder, self._decoder = self._decoder, None
        return self._input(decoder.finish()) if decoder is not None else []

    def _input(self, text: str) -> list[Part]:
        return [CustomPart("arguments", text, self._call)] if text else []


class InputDecoder:
    """Decodes the input in `{"input": "..."}`. Arguments of any other form are decoded at their end."""

    def __init__(self) -> None:
        self._pending: list[str] = []  # text that is not decoded yet
        self._opening = True  # whether only the text before the input has been read
        self._opened = False  # whether the text of the input has begun
        self._closed = False
        self._high = ""  # the first half of a surrogate pair

    def feed(self, text: str) -> str:
        self._pending.append(text)
        if self._opening:
            begin = "".join(self._pending)
            self._pending = [begin]
            opening = OPENING.match(begin)
            if opening is not None:
                self._pending, self._opened = [begin[opening.end() :]], True
            self._opening = opening is None and len(begin) < OPENING_CHARACTERS
        return self._decode() if self._opened else ""

    def finish(self) -> str:
        return "" if self._opened else whole_input("".join(self._pending))

    def _decode(self) -> str:
        pending = "".join(self._pending)
        if self._closed:
            return ""
        characters = CHARACTERS.match(pending)
        assert characters is not None  # it matches the empty string
        rest = pending[characters.end() :]
        self._closed = rest.startswith('"')
        self._pending = [rest]
        text = self._high + ESCAPE.sub(unescape, characters[0])
        self._high = ""
        if not self._closed and text and "\ud800" <= text[-1] <= "\udbff":
            text, self._high = text[:-1], text[-1]
        return join_surrogates(text)


def unescape(escape: re.Match[str]) -> str:
    """The character of an escape in a JSON string; an unknown escape stays as it is."""
    code = escape[1]
    if len(code) > 1:
        return chr(int(code[1:], 16))
    return ESCAPED.get(code) or (code if code in '"\\/' else escape[0])


def join_surrogates(text: str) -> str:
    """The text with surrogate pairs as characters, and halves of pairs as replacement characters."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") if SURROGATES.search(text) else text


def whole_input(arguments: str) -> str:
    """The input in complete arguments: the parameter, the only string, or else the arguments as they are."""
    try:
        value = json_body.decode(arguments)
    except json_body.InvalidJSON:
        return arguments
    if isinstance(value, dict):
        strings = [each for each in value.values() if isinstance(each, str)]
        value = value.get(INPUT, strings[0] if len(value) == len(strings) == 1 else None)
    return value if isinstance(value, str) else arguments
