"""Builds grammars from jobs, in llguidance's serialization or in Lark. Runs in the validator process, which may die of it.

A schema is relaxed where no grammar can enforce it, and what is not enforced is named. A strict schema is refused then.
"""

import json
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

from llguidance import LLMatcher

from outrider.server.chat.gbnf import to_lark
from outrider.server.chat.grammar_job import INPUT, LENIENT, Built, GrammarJob, InputGrammar, Structure
from outrider.server.chat.schemas.normal import Normal, normalised, of_objects
from outrider.server.chat.schemas.notes import Note, names
from outrider.server.chat.schemas.relaxing import WHOLE, Budget, Exhausted, free, relax
from outrider.server.chat.tools.grammar import calls_grammar
from outrider.server.chat.tools.lark import COMPACT
from outrider.server.chat.tools.lark_pattern import lark_pattern
from outrider.server.chat.tools.tagged_grammar import PARAMETERS

# An answer names at most this many keywords.
MAX_NAMES = 64
# A larger schema is checked alone, too: among others, its arguments are not forced, and their first mask is not computed.
LARGE = 1 << 13
LEFT_OUT = "it is too large, or it takes too long to compile"
# Says why a grammar is refused; empty if it is accepted.
Refusal = Callable[[str], str]


def build(job: GrammarJob, refusal: Refusal) -> Built:
    """The grammar of a job, which is not refused. Raises ValueError if there is none."""
    refusal = cache(refusal)
    parts, ignored = dict[str, str](), list[str]()
    if job.functions:
        parts["calls"], notes = CallsBuilder(job, refusal).build()
        ignored += [f"tools.{name}" for name in names(notes)]
    if job.structure is not None:
        parts["structure"], notes = structure_grammar(job, job.structure, refusal)
        ignored += [f"{job.name}.{name}" for name in names(notes)]
    grammar = joined(job.prefix, parts)
    if reason := refusal(grammar):
        raise ValueError(reason)
    return Built(grammar, ignored=ignored[:MAX_NAMES])


def structure_grammar(job: GrammarJob, structure: Structure, refusal: Refusal) -> tuple[str, list[Note]]:
    """The grammar of a structure, and what it does not enforce. Raises ValueError."""
    if structure.kind not in ("json_schema", LENIENT):
        return to_grammar(structure, job.special), []
    normal = normalised(structure.value)
    relax(normal, partial(schema_reason, refusal), Budget())
    if structure.kind != LENIENT and normal.notes:
        raise ValueError(normal.notes[0].sentence)
    return json_grammar(normal.standalone), [*normal.notes, *([Note((), WHOLE, LEFT_OUT)] if "" in job.free else ())]


class CallsBuilder:
    def __init__(self, job: GrammarJob, refusal: Refusal) -> None:
        """Raises ValueError."""
        self._job = job
        self._refusal = refusal
        self._strict = {*job.strict, *job.inputs}
        self._functions = {name: of_objects(schema) for name, schema in job.functions.items()}
        self._functions |= {name: of_input(name, grammar) for name, grammar in job.inputs.items()}
        for name in self._functions.keys() & job.free:
            self._functions[name].notes.append(Note((), WHOLE, LEFT_OUT))

    def build(self) -> tuple[str, list[Note]]:
        """The grammar, and what it does not enforce. Raises ValueError."""
        size = {name: len(json.dumps(normal.standalone)) for name, normal in self._functions.items()}
        self._relax(list(size) if self._reason() else [name for name in size if size[name] > LARGE])
        lenient = sorted(size.keys() - self._strict, key=lambda name: (size[name], name), reverse=True)
        while (reason := self._reason()) and lenient:  # together they are too much
            count = (len(lenient) + 1) // 2
            for name in lenient[:count]:
                free(self._functions[name], reason)
            lenient = lenient[count:]
        notes: list[Note] = []
        for name, normal in self._functions.items():
            given = [note._replace(keyword=PARAMETERS) if note[:2] == ((), WHOLE) else note for note in normal.notes]
            notes += [note._replace(path=(name, *note.path)) for note in given]
        written: list[Note] = []
        grammar = self._grammar(self._functions, written)
        self._check_strict([*notes, *(note for note in written if note.keyword == PARAMETERS)])
        return grammar, notes + written

    def _relax(self, names: list[str]) -> None:
        """Relaxes each of these schemas that is refused alone, while the budget lasts."""
        budget = Budget()
        for name in names:
            try:
                relax(self._functions[name], partial(schema_reason, self._refusal), budget, partial(self._reason, name))
            except Exhausted:
                return

    def _reason(self, *selected: str) -> str:
        """Why the grammar of these functions is refused, or that of all; empty if it is accepted."""
        functions = {name: self._functions[name] for name in selected} or self._functions
        try:
            return self._refusal(self._grammar(functions, []))
        except ValueError as error:
            return str(error)

    def _grammar(self, functions: dict[str, Normal], notes: list[Note]) -> str:
        """The grammar of calls of these functions; appends to `notes`. Raises ValueError if it is too large."""
        return calls_grammar(
            self._job.format, functions, self._job.max_calls, self._job.special, notes, self._job.structure is not None
        )

    def _check_strict(self, notes: list[Note]) -> None:
        """Raises ValueError if a note is about a strict function."""
        for note in notes:
            if note.path[0] in self._job.inputs:
                raise ValueError(f"the grammar of tool {note.path[0]!r} cannot be enforced: {note.reason}")
            if note.path[0] in self._strict:
                raise ValueError(f"tool {note.path[0]!r} is strict, and {note._replace(path=note.path[1:]).sentence}")


def of_input(name: str, grammar: InputGrammar) -> Normal:
    """The parameters of a function that stands for a custom tool. Raises ValueError if there is no such regex."""
    try:
        pattern = grammar.definition if grammar.syntax == "regex" else lark_pattern(grammar.definition)
    except ValueError as error:
        raise ValueError(f"the grammar of tool {name!r} cannot be enforced: {error}") from None
    text = {"type": "string", "pattern": f"^(?:{pattern})$"}
    schema = {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}
    return Normal(schema, paths={id(schema): (), id(text): (INPUT,)})


def json_grammar(schema: Any) -> str:
    """The grammar of JSON that follows a normalised schema. Raises ValueError."""
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=COMPACT)


def schema_reason(refusal: Refusal, schema: Any) -> str:
    """Why a normalised schema is refused; empty if it is accepted."""
    try:
        return refusal(json_grammar(schema))
    except ValueError as error:  # a number is out of range
        return str(error)


def to_grammar(structure: Structure, special: Mapping[str, int]) -> str:
    """The structure in llguidance's serialization. Raises ValueError."""
    value = structure.value
    match structure.kind:
        case "json_object":
            return json_grammar({"type": "object"})
        case "regex":
            return LLMatcher.grammar_from_regex(value)
        case "choice":
            # As one terminal: rules of an alternative each may be 2,000 at most.
            return LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(json.dumps(each) for each in value))
    return LLMatcher.grammar_from_lark(to_lark(value, special))


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
