"""No schema is refused as an answer's or in a format of calls, none is enforced wrongly, and what is not enforced is named."""

from typing import Any

import jsonschema
import pytest

from outrider.server.chat.grammar_builder import build
from outrider.server.chat.grammar_job import LENIENT, Built, GrammarJob, Structure
from outrider.server.chat.grammar_validator import reason
from outrider.server.chat.tools.parser import tool_parser
from tests.server.chat.following import BYTES, accepts
from tests.server.chat.schemas.members import CITY, MEMBERS, SLUG, WORD, Member, one
from tests.server.chat.tools.test_parser import content_and_calls

each_member = pytest.mark.parametrize("member", MEMBERS.values(), ids=list(MEMBERS))


def built(**fields: Any) -> Built:
    """The grammar of a job, and what it does not enforce, without the names of fields."""
    found = build(GrammarJob(name="field", **fields), lambda grammar: reason(grammar, BYTES))
    return found._replace(ignored=[name.partition(".")[2] for name in found.ignored])


@each_member
def test_an_answer_follows_the_schema(member: Member) -> None:
    grammar, *_, ignored = built(structure=Structure(LENIENT, member.schema))
    assert [text for text in member.valid if not accepts(grammar, text)] == []
    assert [text for text in member.invalid if accepts(grammar, text)] == []
    assert tuple(ignored) == member.ignored


@each_member
@pytest.mark.parametrize("format", ["hermes", "harmony"])
def test_a_call_follows_the_schema(format: str, member: Member) -> None:
    grammar, *_, ignored = built(functions={"f": member.schema}, format=format)
    form = {
        "hermes": '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>',
        "harmony": "<|channel|>commentary to=functions.f <|constrain|>json<|message|>%s",
    }[format]
    assert [text for text in member.valid if not accepts(grammar, form % text)] == []
    assert [text for text in member.invalid if accepts(grammar, form % text)] == []
    assert tuple(ignored) == tuple(f"f.{name}" for name in member.ignored)


TAGS = "<tool_call>\n<function=f>\n%s</function>\n</tool_call>"
TAG = "<parameter=%s>\n%s\n</parameter>\n"
FORMS = [
    ("qwen3_coder", TAGS % (TAG % ("from", '{"city": "a"}') + TAG % ("to", '{"city": "b"}')), MEMBERS["to a property"].schema),
    ("qwen3_coder", TAGS % TAG % ("a", "5"), MEMBERS["in old drafts"].schema),
    ("qwen3_coder", TAGS % TAG % ("b", "5"), MEMBERS["union"].schema),
    ("qwen3_coder", TAGS % TAG % ("a", "5"), MEMBERS["merged"].schema),
    ("qwen3_coder", TAGS % (TAG % ("k", "5") + TAG % ("l", "6")), MEMBERS["record"].schema),
    (
        "glm45",
        "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>5</arg_value>\n</tool_call>",
        one({"$ref": "#/$defs/w"}, **{"$defs": {"w": WORD}}),
    ),
    ("pythonic", '[f(from="x", class="y")]', MEMBERS["keywords"].schema),
    ("pythonic", '[f(user-id="x", $top="y")]', MEMBERS["hyphens"].schema),
    ("pythonic", '[f(k="x", l="y")]', MEMBERS["record"].schema),
    ("lfm2", '<|tool_call_start|>[f(a="x")]<|tool_call_end|>', MEMBERS["union"].schema),
    ("gemma4", '<|tool_call>call:f{<|"|>a>"=:b<|"|>:<|"|>x<|"|>}<tool_call|>', MEMBERS["odd"].schema),
    (
        "gemma4",
        '<|tool_call>call:f{a:{city:<|"|>x<|"|>}}<tool_call|>',
        one({"allOf": [{"$ref": "#/$defs/c"}]}, **{"$defs": {"c": CITY}}),
    ),
]


@pytest.mark.parametrize(("format", "text", "schema"), FORMS, ids=range(len(FORMS)))
def test_calls_of_formats_without_json_are_accepted_and_parsed(format: str, text: str, schema: Any) -> None:
    grammar, *_ = built(functions={"f": schema}, format=format)
    assert accepts(grammar, text)
    parser = tool_parser(format, {"f": schema})
    content, calls = content_and_calls([*parser.feed(text), *parser.finish()])
    assert content == "" and len(calls) == 1
    jsonschema.validate(
        calls[0][1], {key: value for key, value in schema.items() if key != "properties" or "pattern" not in str(value)}
    )


@pytest.mark.parametrize(
    ("format", "schema", "ignored"),
    [
        ("qwen3_coder", one(SLUG), ["f.a.pattern"]),
        ("qwen3_coder", one({**WORD, "pattern": "^a$", "format": "date"}), ["f.a.pattern", "f.a.format"]),
        ("qwen3_coder", MEMBERS["odd"].schema, ["f.parameters"]),
        ("qwen3_coder", one({"enum": ["x</parameter>y"]}), ["f.a.enum"]),
        ("pythonic", MEMBERS["odd"].schema, ["f.parameters"]),
        ("gemma4", MEMBERS["odd"].schema, []),
        ("gemma4", one({"type": "object", "properties": {"b": {**WORD, "pattern": "^a$"}}}), ["f.a.b.pattern"]),
        ("pythonic", one({**WORD, "pattern": "^a$"}), []),
        ("glm47", {"type": "object", "patternProperties": {"^a": WORD}}, ["f.patternProperties"]),
        ("glm47", {"anyOf": [one({"const": value}) for value in "abcdefghij"]}, ["f.parameters"]),
    ],
)
def test_what_a_format_cannot_enforce_has_a_name(format: str, schema: Any, ignored: list[str]) -> None:
    assert built(functions={"f": schema}, format=format).ignored == ignored


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (
            one(SLUG),
            "'pattern' at a cannot be enforced: regex parse error: look-around, .* is not supported; change or remove it.",
        ),
        (one({"type": "array", "items": {"not": {}}}), "'not' at a.items cannot be enforced; change"),
        (one({"$ref": "#/x"}), r"'\$ref' at a cannot be enforced: what it refers to is not in the schema"),
        (
            one({"oneOf": [WORD, {**WORD, "minLength": 3}]}),
            "'oneOf' at a cannot be enforced: oneOf constraints are not supported",
        ),
        (one(WORD, minProperties=5), "'minProperties' cannot be enforced"),
    ],
)
def test_a_strict_schema_is_refused_by_the_place_and_the_keyword(schema: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        built(structure=Structure("json_schema", schema))
    for format in ("hermes", "deepseek_v3"):
        with pytest.raises(ValueError, match=f"tool 'f' is strict, and {words}"):
            built(functions={"g": {}, "f": schema}, format=format, strict=["f"])
        assert built(functions={"g": {}, "f": schema}, format=format, strict=["g"]).ignored
