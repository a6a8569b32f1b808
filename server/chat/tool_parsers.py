"""Tool-call parsers: from the formats that models write to OpenAI's.

The parts do not depend on how the text is cut into pieces. The format is detected from the model's chat template.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from server.partial_match import overlap

ToolFormat = Literal["hermes", "llama3", "mistral", "pythonic"]
MAX_CALLS = 8  # in an answer whose calls are enforced by a grammar


@dataclass(frozen=True)
class Part:
    """A part of an answer: text, the name of a new call, or a fragment of a call's arguments."""

    kind: Literal["content", "reasoning", "call", "arguments"]
    text: str
    call: int = 0  # the call's number, from 0


class ToolParser(Protocol):
    """Finds tool calls in text that is being generated."""

    def feed(self, text: str) -> list[Part]:
        """The parts that later text cannot change."""

    def finish(self) -> list[Part]:
        """The parts of the pending text at the end of the answer. Incomplete calls are content."""


def detect_format(template: str) -> ToolFormat:
    """The format that a chat template instructs the model to use."""
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" in template:
        return "hermes"
    if "func_name1(params_name1" in template:
        return "pythonic"
    return "llama3" if "<|python_tag|>" in template or '"parameters"' in template else "hermes"


def tool_parser(format: ToolFormat) -> ToolParser:
    """A new parser for one answer."""
    match format:
        case "hermes":
            return JsonToolParser("<tool_call>", "</tool_call>")
        case "mistral":
            return JsonToolParser("[TOOL_CALLS]")
        case "llama3":
            return JsonToolParser("<|python_tag|>", bare=True)
        case "pythonic":
            return PythonicToolParser()


class CallScanner:
    """Scans one JSON object with a name and arguments, character by character."""

    def __init__(self, number: int) -> None:
        self.raw = ""  # everything scanned
        self.done = False
        self.named = False
        self._number = number
        self._depth = 0
        self._quoted = self._escaped = False
        self._key: str | None = None  # of the value that is being scanned
        self._token = ""  # the key or value so far
        self._early_arguments = ""  # arguments before the name

    def feed(self, character: str) -> list[Part]:
        self.raw += character
        structural = not self._quoted
        if self._quoted:
            self._quoted = self._escaped or character != '"'
            self._escaped = not self._escaped and character == "\\"
        elif character == '"':
            self._quoted = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
        if structural and self._depth == 1 and character == "{":
            return []
        if structural and (self._depth == 0 or (self._depth == 1 and character == ",")):
            parts = self._end_value()
            self.done = self._depth == 0
            return parts
        if structural and self._depth == 1 and character == ":" and self._key is None:
            self._key, self._token = self._parsed_token(), ""
            return []
        return self._append(character)

    def _append(self, character: str) -> list[Part]:
        before = self._token
        self._token += character
        if self._key not in ("arguments", "parameters"):
            return []
        # Spaces around the value are not part of it, so spaces are held back.
        new = self._token.strip()[len(before.strip()) :]
        if not self.named:
            self._early_arguments += new
            return []
        return [Part("arguments", new, self._number)] if new else []

    def _end_value(self) -> list[Part]:
        parts = []
        if self._key == "name" and isinstance(name := self._parsed_token(), str):
            self.named = True
            parts = [Part("call", name, self._number)]
            if self._early_arguments:
                parts.append(Part("arguments", self._early_arguments, self._number))
        self._key, self._token = None, ""
        return parts

    def _parsed_token(self) -> Any:
        try:
            return json.loads(self._token)
        except ValueError:
            return None


class JsonToolParser:
    """Calls as JSON objects after an opening marker: Hermes and Qwen, Mistral, and Llama 3, which may omit the marker."""

    def __init__(self, opening: str, closing: str = "", bare: bool = False) -> None:
        """With `bare`, the marker may be missing if the answer begins with a JSON object."""
        self._opening, self._closing = opening, closing
        self._bare = bare
        self._pending = ""
        self._state: Literal["outside", "between_calls"] = "outside"
        self._begun = False  # a character other than whitespace has been read
        self._scanner: CallScanner | None = None  # of the call that is being read
        self._calls = 0

    def feed(self, text: str) -> list[Part]:
        self._pending += text
        parts: list[Part] = []
        before = None
        while self._pending and before != (before := (self._pending, self._state, self._scanner)):
            if self._scanner is not None:
                parts += self._read_call(self._scanner)
            elif self._state == "between_calls":
                self._read_between_calls()
            else:
                parts += self._read_outside()
        return merge_parts(parts)

    def finish(self) -> list[Part]:
        content, self._pending = self._pending, ""
        if self._scanner is not None and not self._scanner.named:
            content = self._scanner.raw + content
        elif self._state == "between_calls":
            content = ""
        self._scanner = None
        return [Part("content", content)] if content else []

    def _read_outside(self) -> list[Part]:
        if self._bare and not self._begun:
            start = self._pending.lstrip()
            if start.startswith("{"):
                self._pending, self._state, self._begun = start, "between_calls", True
                return []
            if not start:
                return []
        at = self._pending.find(self._opening)
        size = at if at >= 0 else len(self._pending) - overlap(self._pending, self._opening)
        content = self._pending[:size].rstrip()  # spaces before a call are not content, so they are held back
        self._begun = self._begun or bool(content)
        if at >= 0:
            self._pending, self._state, self._begun = self._pending[at + len(self._opening) :], "between_calls", True
        else:
            self._pending = self._pending[len(content) :]
        return [Part("content", content)] if content else []

    def _read_between_calls(self) -> None:
        rest = self._pending.lstrip(" \t\r\n,;[]")
        self._pending = rest
        if rest.startswith("{"):
            self._scanner = CallScanner(self._calls)
        elif self._closing and rest.startswith(self._closing):
            self._pending, self._state = rest[len(self._closing) :].lstrip("\n"), "outside"
        elif rest and not (self._closing and self._closing.startswith(rest)):
            self._state = "outside"

    def _read_call(self, scanner: CallScanner) -> list[Part]:
        parts: list[Part] = []
        for used, character in enumerate(self._pending, start=1):
            parts += scanner.feed(character)
            if scanner.done:
                if scanner.named:
                    self._calls += 1
                else:
                    parts = [Part("content", scanner.raw)]
                self._scanner = None
                self._pending = self._pending[used:]
                return parts
        self._pending = ""
        return parts


class PythonicToolParser:
    """Calls as a list of Python calls, `[f(a=1), g(b="x")]`, at the beginning of the answer: Llama 3.2 and 4."""

    def __init__(self) -> None:
        self._pending = ""
        self._plain = False  # the rest is content
        self._calls = 0

    def feed(self, text: str) -> list[Part]:
        self._pending += text
        if self._plain:
            content, self._pending = self._pending, ""
            return [Part("content", content)] if content else []
        start = self._pending.lstrip()
        if start and not start.startswith("[") and not self._calls:
            self._plain = True
            return self.feed("")
        parts: list[Part] = []
        while (end := call_end(self._pending)) is not None:
            call = parse_call(self._pending[:end].lstrip(" \t\r\n,["))
            if call is None:
                self._plain = True
                return parts + self.feed("")
            name, arguments = call
            parts += [Part("call", name, self._calls), Part("arguments", json.dumps(arguments), self._calls)]
            self._calls += 1
            self._pending = self._pending[end:]
        return parts

    def finish(self) -> list[Part]:
        rest, self._pending = self._pending, ""
        return [Part("content", rest)] if rest and not self._calls else []


def call_end(text: str) -> int | None:
    """The end of the first Python call in `text`, after its closing parenthesis; None if it is incomplete."""
    depth, quote, escaped = 0, "", False
    for at, character in enumerate(text):
        if quote:
            if escaped:
                escaped = False
            elif character == "\\":
                escaped = True
            elif character == quote:
                quote = ""
        elif character in "\"'":
            quote = character
        elif character == "(" or (character in "[{" and depth):
            depth += 1
        elif character in ")]}" and depth:
            depth -= 1
            if not depth:
                return at + 1
    return None


def parse_call(source: str) -> tuple[str, dict[str, Any]] | None:
    """The name and the arguments of a Python call with keyword arguments; None if `source` is not one."""
    json_names = {"true": True, "false": False, "null": None}  # models also write these in Python calls
    try:
        node = ast.parse(source.strip(), mode="eval").body
        if not isinstance(node, ast.Call) or node.args:
            return None
        arguments: dict[str, Any] = {}
        for keyword in node.keywords:
            if keyword.arg is None:
                return None
            for inner in ast.walk(keyword):
                for field, value in ast.iter_fields(inner):
                    if isinstance(value, ast.Name) and value.id in json_names:
                        setattr(inner, field, ast.Constant(json_names[value.id]))
            arguments[keyword.arg] = ast.literal_eval(keyword.value)
        json.dumps(arguments)
        return ast.unparse(node.func), arguments
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


def merge_parts(parts: Sequence[Part]) -> list[Part]:
    """Joins neighbours of the same kind and call."""
    merged: list[Part] = []
    for part in parts:
        if merged and part.kind != "call" and (merged[-1].kind, merged[-1].call) == (part.kind, part.call):
            merged[-1] = Part(part.kind, merged[-1].text + part.text, part.call)
        else:
            merged.append(part)
    return merged
