"""Structured output in requests: from the fields that ask for it to one grammar, checked before anything is queued."""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from llguidance import LLMatcher

from server.chat.tool_parsers import MOST_CALLS, ToolFormat
from server.http.errors import APIError
from server.openai.conversation import NamedTool
from server.openai.schema import ChatBody, GenerationBody
from server.settings import Limits
from verify.grammar_limits import LIMITS, first_line

KEPT = 256  # grammars known to be good; the least recently used goes first
# One way to write each value: what a small model could pad for ever with spaces, it cannot.
COMPACT: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
LENIENT: Any = {**COMPACT, "lenient": True}


class GrammarChecker:
    """Makes grammars of requests, and remembers which are good."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._good: OrderedDict[str, None] = OrderedDict()

    async def calls(self, body: ChatBody, format: ToolFormat, special: Mapping[str, int]) -> str | None:
        """The grammar of the tool calls that the answer must be; None where it need not. Raises APIError."""
        if not body.forced_tools:
            return None
        self._bound("tools", [tool.function.parameters for tool in body.forced_tools])
        most = 1 if body.parallel_tool_calls is False or isinstance(body.tool_choice, NamedTool) else MOST_CALLS
        functions = {tool.function.name: tool.function.parameters or {"type": "object"} for tool in body.forced_tools}
        return await self._checked("tools", LLMatcher.grammar_from_lark(calls_grammar(format, functions, most, special)))

    async def grammar(self, body: GenerationBody) -> str | None:
        """The grammar that the answer must follow, as llguidance writes it down; None = any text. Raises APIError."""
        wanted = body.structures
        if not wanted:
            return None
        if len(wanted) > 1:
            names = " and ".join(f"'{name}'" for name in wanted)
            raise APIError(400, f"Give only one of {names}.", next(iter(wanted)), "invalid_value")
        [(name, (kind, value))] = wanted.items()
        self._bound(name, value)
        return await self._checked(name, write(kind, value))

    async def _checked(self, name: str, grammar: str) -> str:
        """The grammar, if it can be followed. Raises APIError."""
        if grammar not in self._good:
            reason = await asyncio.to_thread(LLMatcher.validate_grammar, grammar, limits=LIMITS)
            if reason and not reason.startswith("WARNING"):
                raise APIError(400, f"Invalid '{name}': {first_line(reason)}", name, "invalid_grammar")
            self._good[grammar] = None
            if len(self._good) > KEPT:
                self._good.popitem(last=False)
        return grammar

    def _bound(self, name: str, value: Any) -> None:
        """Raises APIError where a structure is larger or deeper than the settings allow."""
        most = self._limits.grammar_bytes
        if len(value if isinstance(value, str) else json.dumps(value)) > most:
            raise APIError(400, f"'{name}' is longer than the {most} bytes that are allowed.", name, "too_long")
        if depth(value) > self._limits.schema_depth:
            raise APIError(400, f"'{name}' is deeper than {self._limits.schema_depth} levels.", name, "too_deep")


def write(kind: str, value: Any) -> str:
    """One kind of structure as llguidance writes it down."""
    if kind == "json_object":
        return LLMatcher.grammar_from_json_schema({"type": "object"}, overrides=COMPACT)
    if kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(json.dumps(value), overrides=COMPACT)
    if kind == "lenient_json_schema":
        return LLMatcher.grammar_from_json_schema(json.dumps(value), overrides=LENIENT)
    if kind == "regex":
        return LLMatcher.grammar_from_regex(value)
    if kind == "choice":
        return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(each) for each in value))
    return LLMatcher.grammar_from_lark(value)


def calls_grammar(format: ToolFormat, functions: Mapping[str, Any], most: int, special: Mapping[str, int]) -> str:
    """In llguidance's Lark: one to `most` calls of `functions` (parameters' schemas by name), written as the format has it.

    `special` are the tokenizer's special tokens: a marker that is one is no text.
    """

    def marker(text: str) -> str:
        return f"<[{special[text]}]>" if text in special else json.dumps(text)

    rules = [f"call: {' | '.join(f'f{number}' for number in range(len(functions)))}"]
    for number, (name, parameters) in enumerate(functions.items()):
        rules.append(f"f{number}: {_pythonic(name, parameters) if format == 'pythonic' else _object(format, name, parameters)}")
    more = f"~0..{most - 1}" if most > 1 else "~0"
    match format:
        case "hermes":
            one = f'{marker("<tool_call>")} "\\n" call "\\n" {marker("</tool_call>")}'
            start = f'start: one ("\\n" one){more}\none: {one}'
        case "mistral":
            start = f'start: {marker("[TOOL_CALLS]")} "[" call (", " call){more} "]"'
        case "llama3":
            start = f'start: call ("; " call){more}'
        case "pythonic":
            start = f'start: "[" call (", " call){more} "]"'
    return "\n".join([start, *rules])


def _object(format: ToolFormat, name: str, parameters: Any) -> str:
    key = "parameters" if format == "llama3" else "arguments"
    schema = {
        "x-guidance": COMPACT,
        "type": "object",
        "properties": {"name": {"const": name}, key: {k: v for k, v in parameters.items() if k != "$defs"}},
        "required": ["name", key],
        "additionalProperties": False,
        "$defs": parameters.get("$defs", {}),  # references count from the root
    }
    return f"%json {json.dumps(schema)}"


def _pythonic(name: str, parameters: Any) -> str:
    """Required arguments in their order, then those that may be left out."""
    properties, required = parameters.get("properties", {}), parameters.get("required", [])
    definitions = {"x-guidance": COMPACT, "$defs": parameters.get("$defs", {})}
    parts: list[str] = []
    for argument in [*required, *(each for each in properties if each not in required)]:
        comma = '", " ' if parts else ""
        value = f"{comma}{json.dumps(f'{argument}=')} %json {json.dumps({**definitions, **properties.get(argument, {})})}"
        parts.append(value if argument in required else f"({value})?")
        if argument not in required and len(parts) == 1:
            break  # without the first one, the next would begin with a comma
    return " ".join([json.dumps(f"{name}("), *parts, '")"'])


def depth(value: Any) -> int:
    """How deep lists and objects are nested, without recursion: a body may be nested deeper than Python's stack."""
    level, deepest = [value], 0
    while level:
        level = [
            inner
            for each in level
            if isinstance(each, (dict, list))
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
        deepest += 1
    return deepest
