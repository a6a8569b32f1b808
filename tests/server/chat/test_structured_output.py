"""Structures become grammars that accept exactly the structured texts; invalid structures are rejected."""

import asyncio
from contextlib import closing
from typing import Any

import pytest

from outrider.server.chat import grammar_builder, grammar_validator
from outrider.server.chat.grammar_builder import build, joined
from outrider.server.chat.grammar_job import GrammarJob, InputGrammar, Structure
from outrider.server.chat.reasoning_parser import REASONING_FORMATS, THINK, ReasoningFormat
from outrider.server.chat.structured_output import Enforced, GrammarChecker
from outrider.server.chat.tools import FORMATS
from outrider.server.http.errors import APIError
from tests.grammars import record
from tests.server.chat.following import accepts
from tests.server.fakes import GRAMMARS

POINT = record(x={"type": "integer"})


def to_grammar(structure: Structure) -> str:
    return build(GrammarJob(structure=structure), lambda _: "").grammar


def calls_of(functions: dict[str, Any], checker: GrammarChecker = GRAMMARS, **fields: Any) -> Enforced:
    """The grammar of calls of these functions, whose schemas are given; `fields` are the job's."""
    return asyncio.run(checker.check(GrammarJob(functions=functions, **fields)))


def test_tool_calls_are_checked_and_bounded() -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {%s}}\n</tool_call>'
    with closing(GrammarChecker(60)) as checker:
        grammar = calls_of({"f": {}}, checker).grammar
        assert grammar and accepts(grammar, call % "")
        with pytest.raises(APIError) as raised:
            calls_of({"f": POINT}, checker, strict=["f"])
        assert (raised.value.param, raised.value.code) == ("tools", "too_long")
        grammar, ignored = calls_of({"f": POINT, "g": {"maxProperties": 0}}, checker)
        assert grammar and accepts(grammar, call % '"y": 1') and ignored == ["tools.f.parameters"]
        assert not accepts(grammar, (call % '"y": 1').replace('"f"', '"g"'))


MALFORMED: list[tuple[Any, str]] = [({"properties": 5}, "f.properties"), ({"properties": {"a": 5}}, "f.a.schema")]
MALFORMED += [({"required": each}, "f.required") for each in ("a", [["a"]])]


@pytest.mark.parametrize(("parameters", "place"), [*MALFORMED, ({"properties": {"a": {"type": "file"}}}, "f.a.type")])
def test_malformed_parameters_are_ignored_by_name_or_refused(parameters: Any, place: str) -> None:
    for format in FORMATS:
        assert f"tools.{place}" in calls_of({"f": parameters}, format=format).ignored
        with pytest.raises(APIError, match=r"tool 'f' is strict, and '\w+'.* cannot be enforced: it is malformed") as raised:
            calls_of({"f": parameters}, format=format, strict=["f"])
        assert (raised.value.status_code, raised.value.param) == (400, "tools")


@pytest.mark.parametrize("reasoning", [each for each in REASONING_FORMATS if not each.channels], ids=lambda each: each.name)
@pytest.mark.parametrize(
    ("structure", "answer"),
    [
        (Structure("json_schema", POINT), '{"x": 1}'),
        (Structure("regex", "[ab]+c"), "abc"),
        (Structure("choice", ["yes", "no"]), "no"),
        (Structure("choice", [str(number) for number in range(3000)]), "2999"),
        (Structure("grammar", 'start: "a" answer\nanswer: "b"'), "ab"),
    ],
    ids=lambda each: each.kind if isinstance(each, Structure) else "",
)
def test_a_structure_applies_after_the_reasoning(reasoning: ReasoningFormat, structure: Structure, answer: str) -> None:
    grammar = joined(reasoning.prefix({}, calls=False), {"structure": to_grammar(structure)})
    for thought in ("", "Well, {}.\n\n", "< a </ b"):
        assert accepts(grammar, f"{thought}{reasoning.closing}{answer}")
        assert accepts(grammar, f"{thought}{reasoning.closing}\n\n{answer}")
        assert not accepts(grammar, f"{thought}{reasoning.closing}other")
    assert not accepts(grammar, answer)
    prefix = reasoning.prefix({}, calls=False)
    assert asyncio.run(GRAMMARS.grammar({"field": structure}, prefix=prefix)).grammar == grammar
    calls = calls_of({"f": POINT}, prefix=prefix).grammar
    assert calls and accepts(
        calls, f'Hm.{reasoning.closing}\n\n<tool_call>\n{{"name": "f", "arguments": {{"x": 1}}}}\n</tool_call>'
    )


def test_harmony_puts_a_structure_into_the_final_channel() -> None:
    harmony = REASONING_FORMATS[0]
    grammar = joined(harmony.prefix({}, calls=False), {"structure": to_grammar(Structure("json_schema", POINT))})
    final = '<|channel|>final<|message|>{"x": 1}'
    assert accepts(grammar, final)
    assert accepts(grammar, f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{final}")
    assert not accepts(grammar, '{"x": 1}')
    calls = calls_of({"f": POINT}, format="harmony", prefix=harmony.prefix({}, calls=True)).grammar
    call = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}'
    assert calls and accepts(calls, call)
    assert accepts(calls, f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{call}")
    assert not accepts(calls, final)


def test_no_grammar_is_converted_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("converted on the event loop")

    monkeypatch.setattr(grammar_validator, "build", fail)
    for name in ("build", "to_lark", "calls_grammar", "lark_pattern", "normalised", "LLMatcher"):
        monkeypatch.setattr(grammar_builder, name, fail)
    with closing(GrammarChecker()) as checker:
        assert asyncio.run(checker.grammar({"grammar": Structure("grammar", 'root ::= "a"')}))
        assert asyncio.run(checker.grammar({"field": Structure("json_schema", POINT)}))
        inputs = {"f": InputGrammar("lark", 'start: "a"{1,2}')}
        assert calls_of({"f": {}, "g": POINT}, checker, inputs=inputs)


CALLS = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>",
    "mistral": '[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}]',
    "pythonic": "[f(x=1)]",
    "llama3": '{"name": "f", "parameters": {"x": 1}}',
    "harmony": '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}',
}


@pytest.mark.parametrize("format", CALLS)
@pytest.mark.parametrize(
    ("structure", "answer"),
    [
        (
            Structure("json_schema", {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}),
            '{"a": "b"}',
        ),
        (Structure("lenient_json_schema", {"type": "object"}), '{"a": [1]}'),
        (Structure("json_object", None), '{"a": {"b": null}}'),
        (Structure("regex", "[ab]+c"), "abc"),
        (Structure("regex", r"\{.*\}"), '{"a}'),
        (Structure("choice", ["yes", "no"]), "no"),
        (Structure("grammar", 'start: "a" answer\nanswer: "b"'), "ab"),
        (Structure("grammar", 'root ::= "a" [b-c]+'), "abc"),
    ],
)
def test_with_tools_an_answer_has_calls_or_the_structure(format: str, structure: Structure, answer: str) -> None:
    fields: dict[str, Any] = {"format": format, "structure": structure, "name": "field"}
    grammar = calls_of({"f": POINT}, **fields).grammar
    reasoned = calls_of({"f": POINT}, **fields, prefix=THINK.prefix({}, False)).grammar
    for text in (answer, CALLS[format]):
        assert accepts(grammar, text)
        assert accepts(reasoned, f"Hm.</think>{text}")
    assert not accepts(grammar, "Hello.")
    if structure.kind != "regex":
        assert accepts(grammar, '{"name": "f", "arguments": {"x": 1}}')
    if structure.kind == "json_schema":
        assert not accepts(grammar, '{"name": "f", "arguments": {"y": 1}}')
        assert not accepts(grammar, '{"name": "g", "arguments": {"x": 1}}')
