"""Structured output: from JSON schemas, regexes, grammars and tools to one checked llguidance grammar.

A grammar is compiled before its request is queued, so that an invalid one fails only that request.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from llguidance import LLMatcher

from server.chat.grammar_depth import json_depth, rule_depth
from server.chat.grammar_process import GrammarValidator
from server.chat.tools.formats import ToolFormat
from server.chat.tools.grammar import MAX_CALLS, calls_grammar
from server.chat.tools.lark import COMPACT
from server.http.errors import APIError
from server.settings import Limits
from verify.constraints.limits import first_line

LENIENT: Any = {**COMPACT, "lenient": True}


class Structure(NamedTuple):
    """A structure that the answer must follow."""

    kind: str  # "json_object", "json_schema", "lenient_json_schema", "regex", "choice" or "grammar"
    value: Any  # the schema, regex, list of choices, or grammar


class GrammarChecker:
    """Builds and checks the grammars of requests."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._validator = GrammarValidator()

    async def tool_calls(
        self,
        functions: Mapping[str, Any],
        format: str | ToolFormat,
        special: Mapping[str, int],
        single: bool = False,
        principal: str = "",
        prefix: str = "",
    ) -> str:
        """The grammar of one or more calls of `functions` (schemas of the parameters by name). Raises APIError.

        With `single`, exactly one call is allowed. `special`: see `Vocabulary.grammar_tokens`. `prefix`: see `prefixed`.
        """
        self._check_size("tools", list(functions.values()))
        schemas = {name: parameters or {"type": "object"} for name, parameters in functions.items()}
        max_calls = 1 if single else MAX_CALLS

        def build() -> str:
            return prefixed(prefix, calls_grammar(format, schemas, max_calls, special))

        return await self._checked("tools", build, principal)

    async def grammar(self, structures: Mapping[str, Structure], principal: str = "", prefix: str = "") -> str | None:
        """The grammar of a request's structures, by field; None = any text. Raises APIError if there are several.

        `prefix`: see `prefixed`.
        """
        if not structures:
            return None
        if len(structures) > 1:
            names = " and ".join(f"'{name}'" for name in structures)
            raise APIError(400, f"Give only one of {names}.", next(iter(structures)), "invalid_value")
        [(name, structure)] = structures.items()
        self._check_size(name, structure.value)
        if structure.kind == "grammar" and rule_depth(structure.value) > self._limits.rule_depth:
            message = f"The rules of '{name}' refer to each other more than {self._limits.rule_depth} deep; flatten them."
            raise APIError(400, message, name, "too_deep")
        return await self._checked(name, lambda: prefixed(prefix, to_grammar(structure)), principal)

    def close(self) -> None:
        """Ends the process that validates grammars. Blocks until the current one is finished."""
        self._validator.close()

    async def _checked(self, name: str, build: Callable[[], str], principal: str) -> str:
        """The grammar that `build` returns, if it is valid. Raises APIError, naming the field `name`."""
        try:
            grammar = build()
            reason = await self._validator.validate(grammar, principal)
        except UnicodeEncodeError:
            raise  # has its own error response
        except ValueError as error:
            reason = first_line(str(error))
        except OSError:
            raise APIError(503, "The server cannot check grammars now; try again shortly.", name, "unavailable") from None
        if reason:
            raise APIError(400, f"Invalid '{name}': {reason}", name, "invalid_grammar")
        return grammar

    def _check_size(self, name: str, value: Any) -> None:
        max_bytes, max_depth = self._limits.grammar_bytes, self._limits.schema_depth
        if json_depth(value) > max_depth:
            raise APIError(400, f"'{name}' is nested deeper than {max_depth} levels; flatten it.", name, "too_deep")
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        if len(text.encode()) > max_bytes:
            raise APIError(400, f"'{name}' is larger than {max_bytes} bytes; shorten it.", name, "too_long")


def to_grammar(structure: Structure) -> str:
    """The structure in llguidance's serialization."""
    value = structure.value
    match structure.kind:
        case "json_object":
            return LLMatcher.grammar_from_json_schema({"type": "object"}, overrides=COMPACT)
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(json.dumps(value), overrides=COMPACT)
        case "lenient_json_schema":
            return LLMatcher.grammar_from_json_schema(json.dumps(value), overrides=LENIENT)
        case "regex":
            return LLMatcher.grammar_from_regex(value)
        case "choice":
            return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(each) for each in value))
    return LLMatcher.grammar_from_lark(value)


def prefixed(prefix: str, grammar: str) -> str:
    """The grammar `prefix`, in Lark, whose "@answer" is `grammar`, in llguidance's serialization; without it, `grammar`."""
    if not prefix:
        return grammar
    answer = json.loads(grammar)["grammars"][0] if grammar.startswith("{") else {"lark_grammar": grammar}
    return json.dumps({"grammars": [{"name": "reasoning", "lark_grammar": prefix}, {**answer, "name": "answer"}]})
