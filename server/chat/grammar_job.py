"""The structure that a request asks its grammar to enforce, and the grammar: messages to the validator process and from it.

A schema that need not be strict may be left out of its job: because it is too large, or because it has ended the process.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import msgspec

LENIENT = "lenient_json_schema"
# A function that stands for a custom tool has this parameter.
INPUT = "input"


class Structure(NamedTuple):
    """A structure that the answer must follow."""

    kind: str  # "json_object", "json_schema", LENIENT, "regex", "choice" or "grammar"
    value: Any  # the schema, regex, list of choices, or grammar

    @property
    def description(self) -> str:
        match self.kind:
            case "json_object":
                return "a JSON object."
            case "choice":
                return f"one of these texts:\n{json.dumps(self.value, ensure_ascii=False)}"
            case "regex" | "grammar":
                return f"text that matches this {self.kind}:\n{self.value}"
        return f"a JSON value that matches this schema:\n{json.dumps(self.value, ensure_ascii=False)}"


class InputGrammar(NamedTuple):
    """The grammar of a custom tool's input."""

    syntax: str  # "lark" or "regex"
    definition: str


@dataclass(frozen=True)
class GrammarJob:
    """One grammar to build: of a structure, of calls, or of both, one of which the answer has."""

    prefix: str = ""  # see `joined`
    structure: Structure | None = None
    name: str = ""  # the request's field that asks for the structure
    functions: Mapping[str, Any] = field(default_factory=dict)  # schemas of the parameters by name
    inputs: Mapping[str, InputGrammar] = field(default_factory=dict)  # grammars of the functions that stand for custom tools
    format: str = "hermes"
    special: Mapping[str, int] = field(default_factory=dict)  # ids of the tokens that a grammar matches by id
    max_calls: int = 1
    strict: Collection[str] = ()  # the functions whose schemas must be enforced wholly
    free: Collection[str] = ()  # the functions whose schemas are left out; "" is the structure's

    @property
    def size_bytes(self) -> int:
        """The size of what the client has sent, as UTF-8. Raises UnicodeEncodeError."""
        sizes = [self._size(name) for name in self._values]
        return sum(sizes) + sum(len(grammar.definition.encode()) for grammar in self.inputs.values())

    @property
    def _values(self) -> Mapping[str, Any]:
        return {**self.functions, **({} if self.structure is None else {"": self.structure.value})}

    def _size(self, name: str) -> int:
        value = self._values[name]
        return len((value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)).encode())

    @property
    def lenient(self) -> list[str]:
        """Functions whose schemas may be left out, and "" for the structure; the largest first. Raises as `size_bytes`."""
        kept = {*self.strict, *self.inputs, *self.free}
        if self.structure is not None and self.structure.kind != LENIENT:
            kept.add("")
        return sorted(self._values.keys() - kept, key=lambda name: (self._size(name), name), reverse=True)

    def without(self, names: Collection[str]) -> GrammarJob:
        """The job without the schemas of these functions."""
        free = [*self.free, *names]
        structure = self.structure
        if structure is not None and "" in free:
            kind = structure.value.get("type")
            structure = Structure(LENIENT, {"type": kind} if isinstance(kind, str) else {})
        functions = {name: {} if name in free else schema for name, schema in self.functions.items()}
        return replace(self, structure=structure, functions=functions, free=free)

    def within(self, max_bytes: int) -> GrammarJob:
        """The job without its largest lenient schemas, so that the rest has this size, if possible. Raises as `size_bytes`."""
        size, left_out = self.size_bytes, []
        for name in self.lenient:
            if size <= max_bytes:
                break
            left_out.append(name)
            size -= self._size(name)
        return self.without(left_out) if left_out else self


class Built(NamedTuple):
    """A grammar in llguidance's serialization or in Lark, or why there is none."""

    grammar: str = ""
    reason: str = ""
    code: str = ""  # code of the error
    ignored: Sequence[str] = ()  # names of what the grammar does not enforce


encode = msgspec.json.Encoder().encode
decode_job = msgspec.json.Decoder(GrammarJob).decode
decode_built = msgspec.json.Decoder(Built).decode
