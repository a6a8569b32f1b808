"""Structured output in requests: from the fields that ask for it to one grammar, checked before anything is queued."""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from typing import Any

from llguidance import LLMatcher

from server.errors import APIError
from server.schema import GenerationBody
from server.settings import Limits

KEPT = 256  # grammars known to be good; the least recently used goes first
# One way to write each value: what a small model could pad for ever with spaces, it cannot.
COMPACT: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
LENIENT: Any = {**COMPACT, "lenient": True}


class GrammarChecker:
    """Makes grammars of requests, and remembers which are good."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._good: OrderedDict[str, None] = OrderedDict()

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
        grammar = write(kind, value)
        if grammar not in self._good:
            reason = await asyncio.to_thread(LLMatcher.validate_grammar, grammar)
            if reason and not reason.startswith("WARNING"):
                sentence = " ".join(reason.split("\n")[0].split())[:300]
                raise APIError(400, f"Invalid '{name}': {sentence}", name, "invalid_grammar")
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
        return LLMatcher.grammar_from_json_schema(value, overrides=COMPACT)
    if kind == "lenient_json_schema":
        return LLMatcher.grammar_from_json_schema(value, overrides=LENIENT)
    if kind == "regex":
        return LLMatcher.grammar_from_regex(value)
    if kind == "choice":
        return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(each) for each in value))
    return LLMatcher.grammar_from_lark(value)


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
