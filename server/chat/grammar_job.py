"""What a request asks its grammar to enforce, and the conversion to llguidance's serialization.

The front end sends jobs as JSON and never converts one itself: a conversion runs in the validator process, which may die.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import msgspec
from llguidance import LLMatcher

from outrider.server.chat.gbnf import to_lark
from outrider.server.chat.grammar_depth import json_depth, rule_depth
from outrider.server.chat.tools.formats import ToolFormat
from outrider.server.chat.tools.grammar import calls_grammar
from outrider.server.chat.tools.lark import COMPACT
from outrider.server.chat.tools.lark_pattern import lark_pattern

LENIENT: Any = {**COMPACT, "lenient": True}
# A function that stands for a custom tool has this parameter.
INPUT = "input"


class TooDeep(ValueError):
    """The structure is nested deeper than the limits allow."""


class Structure(NamedTuple):
    """A structure that the answer must follow."""

    kind: str  # "json_object", "json_schema", "lenient_json_schema", "regex", "choice" or "grammar"
    value: Any  # the schema, regex, list of choices, or grammar


class InputGrammar(NamedTuple):
    """The grammar of a custom tool's input."""

    syntax: str  # "lark" or "regex"
    definition: str


@dataclass(frozen=True)
class GrammarJob:
    """One grammar to build: of a structure, of calls, or of both, one of which the answer has.

    `schema_depth` and `rule_depth` are limits.
    """

    schema_depth: int
    rule_depth: int
    prefix: str = ""  # see `joined`
    structure: Structure | None = None
    functions: Mapping[str, Any] = field(default_factory=dict)  # schemas of the parameters by name
    inputs: Mapping[str, InputGrammar] = field(default_factory=dict)  # grammars of the functions that stand for custom tools
    format: str | ToolFormat = "hermes"
    special: Mapping[str, int] = field(default_factory=dict)  # ids of the tokens that a grammar matches by id
    max_calls: int = 1

    @property
    def size_bytes(self) -> int:
        """The size of what the client has sent, as UTF-8. Raises TooDeep and UnicodeEncodeError."""
        value = self.structure and self.structure.value
        try:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            text += json.dumps(list(self.functions.values()), ensure_ascii=False) if self.functions else ""
        except RecursionError:
            raise TooDeep(too_deep(self.schema_depth)) from None
        return len(text.encode()) + sum(len(grammar.definition.encode()) for grammar in self.inputs.values())

    def encode(self) -> str:
        """The job as one line of ASCII. Raises TooDeep."""
        format = self.format if isinstance(self.format, str) else asdict(self.format)
        try:
            return json.dumps({**vars(self), "format": format})
        except RecursionError:
            raise TooDeep(too_deep(self.schema_depth)) from None


def decode(line: str) -> GrammarJob:
    """The job of a line."""
    fields = json.loads(line)
    format: str | ToolFormat = fields["format"]
    if not isinstance(format, str):
        format = msgspec.convert(format, ToolFormat)
    structure = fields["structure"] and Structure(*fields["structure"])
    inputs = {name: InputGrammar(*grammar) for name, grammar in fields["inputs"].items()}
    return GrammarJob(**{**fields, "format": format, "structure": structure, "inputs": inputs})


def build(job: GrammarJob) -> str:
    """The grammar in llguidance's serialization, or in Lark. Raises TooDeep, and ValueError if it cannot be converted."""
    parts = dict[str, str]()
    if job.functions:
        check_depth(job, list(job.functions.values()))
        functions = {**job.functions, **{name: input_schema(name, grammar) for name, grammar in job.inputs.items()}}
        parts["calls"] = calls_grammar(job.format, functions, job.max_calls, job.special, bare=job.structure is not None)
    if job.structure is not None:
        check_depth(job, job.structure.value)
        parts["structure"] = to_grammar(job.structure, job.rule_depth, job.special)
    return joined(job.prefix, parts)


def check_depth(job: GrammarJob, value: Any) -> None:
    """Raises TooDeep."""
    if json_depth(value) > job.schema_depth:
        raise TooDeep(too_deep(job.schema_depth))


def too_deep(levels: int) -> str:
    """What is wrong with a structure of more than `levels` levels."""
    return f"it is nested deeper than {levels} levels; flatten it."


def input_schema(name: str, grammar: InputGrammar) -> dict[str, Any]:
    """The parameters of a function that stands for a custom tool. Raises ValueError if there is no such regex."""
    try:
        pattern = grammar.definition if grammar.syntax == "regex" else lark_pattern(grammar.definition)
    except ValueError as error:
        raise ValueError(f"the grammar of tool {name!r} cannot be enforced: {error}") from None
    return {
        "type": "object",
        "properties": {INPUT: {"type": "string", "pattern": f"^(?:{pattern})$"}},
        "required": [INPUT],
        "additionalProperties": False,
    }


def to_grammar(structure: Structure, max_rule_depth: int, special: Mapping[str, int]) -> str:
    """The structure in llguidance's serialization. Raises TooDeep and ValueError."""
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
    grammar = to_lark(value, special)
    if rule_depth(grammar) > max_rule_depth:
        raise TooDeep(f"its rules refer to each other more than {max_rule_depth} deep; flatten them.")
    return LLMatcher.grammar_from_lark(grammar)


def joined(prefix: str, parts: Mapping[str, str]) -> str:
    """The grammar of an answer that has one of `parts`, in llguidance's serialization; a single part as it is.

    `prefix`, if it is not empty, is a grammar in Lark whose "@answer" stands for the answer.
    """
    if len(parts) == 1 and not prefix:
        return next(iter(parts.values()))
    choice = "start: " + " | ".join(f"@{name}" for name in parts)
    grammars = [{"name": "reasoning", "lark_grammar": prefix}] if prefix else []
    grammars.append({"name": "answer", "lark_grammar": choice})
    for name, grammar in parts.items():
        found = json.loads(grammar)["grammars"][0] if grammar.startswith("{") else {"lark_grammar": grammar}
        grammars.append({**found, "name": name})
    return json.dumps({"grammars": grammars})
