"""Tool calls: what a model writes, as OpenAI's calls; and the grammars that make it write some.

The readers promise the same calls however the text is cut into pieces. A format is told by the model's chat template.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from server.partial_match import overlap

ToolFormat = Literal["hermes", "llama3", "mistral", "pythonic"]
MOST_CALLS = 8  # that a grammar lets a model make at once


@dataclass(frozen=True)
class Part:
    """A piece of what the model says: text, or a call's name or some of its arguments."""

    kind: Literal["content", "reasoning", "call", "arguments"]
    text: str
    call: int = 0  # which one, counted from 0


class ToolParser(Protocol):
    """Finds calls in growing text."""

    def feed(self, text: str) -> list[Part]:
        """What is certain now."""

    def finish(self) -> list[Part]:
        """What is left at the end: what never became a call is content."""


def format_of(template: str) -> ToolFormat:
    """The format that a chat template teaches."""
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" in template:
        return "hermes"
    if "func_name1(params_name1" in template:
        return "pythonic"
    return "llama3" if "<|python_tag|>" in template or '"parameters"' in template else "hermes"


def reader_of(format: ToolFormat) -> ToolParser:
    """A reader at the beginning of an answer."""
    match format:
        case "hermes":
            return JsonCalls("<tool_call>", "</tool_call>")
        case "mistral":
            return JsonCalls("[TOOL_CALLS]")
        case "llama3":
            return JsonCalls("<|python_tag|>", bare=True)
        case "pythonic":
            return PythonicCalls()


class CallScanner:
    """Reads one JSON object with a name and arguments, a character at a time."""

    def __init__(self, number: int) -> None:
        self.raw = ""
        self.done = False
        self.named = False
        self._number = number
        self._depth = 0
        self._quoted = self._escaped = False
        self._key: str | None = None  # of the value that is being read
        self._token = ""  # the key or value so far
        self._early = ""  # arguments that came before the name

    def feed(self, character: str) -> list[Part]:
        self.raw += character
        structure = not self._quoted
        if self._quoted:
            self._quoted = self._escaped or character != '"'
            self._escaped = not self._escaped and character == "\\"
        elif character == '"':
            self._quoted = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
        if structure and self._depth == 1 and character == "{":
            return []
        if structure and (self._depth == 0 or (self._depth == 1 and character == ",")):
            parts = self._end_value()
            self.done = self._depth == 0
            return parts
        if structure and self._depth == 1 and character == ":" and self._key is None:
            self._key, self._token = self._loaded(), ""
            return []
        return self._take(character)

    def _take(self, character: str) -> list[Part]:
        before = self._token
        self._token += character
        if self._key not in ("arguments", "parameters"):
            return []
        # Spaces around the value are not part of it: they wait for what follows.
        grown = self._token.strip()[len(before.strip()) :]
        if not self.named:
            self._early += grown
            return []
        return [Part("arguments", grown, self._number)] if grown else []

    def _end_value(self) -> list[Part]:
        parts = []
        if self._key == "name" and isinstance(name := self._loaded(), str):
            self.named = True
            parts = [Part("call", name, self._number)]
            if self._early:
                parts.append(Part("arguments", self._early, self._number))
        self._key, self._token = None, ""
        return parts

    def _loaded(self) -> Any:
        try:
            return json.loads(self._token)
        except ValueError:
            return None


class JsonCalls:
    """Calls as JSON objects after an opening marker: Hermes and Qwen, Mistral, and Llama 3, whose answer may begin with one."""

    def __init__(self, opening: str, closing: str = "", bare: bool = False) -> None:
        self._opening, self._closing = opening, closing
        self._bare = bare  # an answer that begins with an object is calls
        self._held = ""
        self._inside = False
        self._begun = False  # something other than spaces has been read
        self._scanner: CallScanner | None = None
        self._calls = 0

    def feed(self, text: str) -> list[Part]:
        self._held += text
        parts: list[Part] = []
        before = None
        while self._held and before != (before := (self._held, self._inside, self._scanner)):
            parts += self._in_call() if self._scanner else self._between() if self._inside else self._outside()
        return merged(parts)

    def finish(self) -> list[Part]:
        left, self._held = self._held, ""
        if self._scanner is not None and not self._scanner.named:
            left = self._scanner.raw + left
        elif self._inside:
            left = ""
        self._scanner = None
        return [Part("content", left)] if left else []

    def _outside(self) -> list[Part]:
        if self._bare and not self._begun:
            start = self._held.lstrip()
            if start.startswith("{"):
                self._held, self._inside, self._begun = start, True, True
                return []
            if not start:
                return []
        at = self._held.find(self._opening)
        size = at if at >= 0 else len(self._held) - overlap(self._held, self._opening)
        content = self._held[:size].rstrip()  # the spaces before a call are not content: they wait
        self._begun = self._begun or bool(content)
        if at >= 0:
            self._held, self._inside, self._begun = self._held[at + len(self._opening) :], True, True
        else:
            self._held = self._held[len(content) :]
        return [Part("content", content)] if content else []

    def _between(self) -> list[Part]:
        rest = self._held.lstrip(" \t\r\n,;[]")
        if rest.startswith("{"):
            self._held, self._scanner = rest, CallScanner(self._calls)
        elif self._closing and rest.startswith(self._closing):
            self._held, self._inside = rest[len(self._closing) :].lstrip("\n"), False
        elif rest and not (self._closing and self._closing.startswith(rest)):
            self._inside, self._held = False, rest
        else:
            self._held = rest
        return []

    def _in_call(self) -> list[Part]:
        assert self._scanner is not None
        parts: list[Part] = []
        for used, character in enumerate(self._held, start=1):
            parts += self._scanner.feed(character)
            if self._scanner.done:
                if self._scanner.named:
                    self._calls += 1
                else:
                    parts = [Part("content", self._scanner.raw)]
                self._scanner = None
                self._held = self._held[used:]
                return parts
        self._held = ""
        return parts


class PythonicCalls:
    """Calls as a list of Python calls, `[f(a=1), g(b="x")]`, where the answer begins with one: Llama 3.2 and 4."""

    def __init__(self) -> None:
        self._held = ""
        self._plain = False
        self._calls = 0

    def feed(self, text: str) -> list[Part]:
        self._held += text
        if self._plain:
            content, self._held = self._held, ""
            return [Part("content", content)] if content else []
        start = self._held.lstrip()
        if start and not start.startswith("[") and not self._calls:
            self._plain = True
            return self.feed("")
        parts: list[Part] = []
        while (end := call_end(self._held)) is not None:
            call = parsed_call(self._held[:end].lstrip(" \t\r\n,["))
            if call is None:
                self._plain = True
                return parts + self.feed("")
            parts += [Part("call", call[0], self._calls), Part("arguments", json.dumps(call[1]), self._calls)]
            self._calls += 1
            self._held = self._held[end:]
        return parts

    def finish(self) -> list[Part]:
        left, self._held = self._held, ""
        return [Part("content", left)] if left and not self._calls else []


def call_end(text: str) -> int | None:
    """Where the first call ends: behind the bracket that closes its first one, strings left out."""
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


def parsed_call(source: str) -> tuple[str, dict[str, Any]] | None:
    """A call's name and its arguments; None where it is none."""
    names = {"true": True, "false": False, "null": None}  # as JSON has them
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
                    if isinstance(value, ast.Name) and value.id in names:
                        setattr(inner, field, ast.Constant(names[value.id]))
            arguments[keyword.arg] = ast.literal_eval(keyword.value)
        json.dumps(arguments)
        return ast.unparse(node.func), arguments
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


def merged(parts: Sequence[Part]) -> list[Part]:
    """Neighbours of one kind and call as one."""
    found: list[Part] = []
    for part in parts:
        if found and part.kind != "call" and (found[-1].kind, found[-1].call) == (part.kind, part.call):
            found[-1] = Part(part.kind, found[-1].text + part.text, part.call)
        else:
            found.append(part)
    return found
