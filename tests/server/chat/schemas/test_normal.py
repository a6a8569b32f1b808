"""Schemas in a normal form, linear in what was given; what is dropped of them, by name; their types and patterns."""

import json
from typing import Any

import pytest

from outrider.server.chat.schemas.keywords import json_depth
from outrider.server.chat.schemas.normal import MAX_LEVELS, children, normalised, rust_pattern, standalone
from outrider.server.chat.schemas.notes import MAX_NAME_CHARACTERS, Note, names
from outrider.server.chat.schemas.references import MAX_SCHEMAS
from outrider.server.chat.schemas.relaxing import Budget, Exhausted, relax
from outrider.server.chat.schemas.types import ANY, TEXT, Texts, texts_of, types_of
from outrider.server.http.ignored import NAME
from tests.grammars import reference_chain


def test_every_schema_that_something_refers_to_is_one_definition() -> None:
    city = {"type": "string"}
    schema = {"properties": {"a": city, "b": {"$ref": "#/properties/a"}, "c": {"$ref": "#/properties/b"}}}
    normal = normalised(schema)
    reference = {"$ref": "#/$defs/d0"}
    assert normal.schema == {"properties": dict.fromkeys("abc", reference)} and normal.definitions == {"d0": city}
    assert standalone({"type": "null"}, normal.definitions) == {"type": "null"}
    assert standalone(reference, normal.definitions) == {**reference, "$defs": {"d0": city}}


def test_nested_references_do_not_multiply() -> None:
    schema: dict[str, Any] = {"enum": ["x" * 1000]}
    pointer = "#"
    for _ in range(40):
        schema = {"properties": {"a": schema}}
    schema["$defs"] = {}
    for level in range(40):
        pointer += "/properties/a"
        schema["$defs"][f"r{level}"] = {"$ref": pointer}
    schema["properties"]["z"] = {"anyOf": [{"$ref": f"#/$defs/r{level}"} for level in range(40)]}
    normal = normalised(schema)
    assert len(json.dumps(normal.standalone)) < 10_000 and not normal.notes


def test_levels_and_the_number_of_schemas_are_bounded() -> None:
    normal = normalised(reference_chain(1000))
    assert len(normal.definitions) <= MAX_LEVELS + 1
    assert [note.keyword for note in normal.notes] == ["schema"]
    many = normalised({"anyOf": [{"type": "null"} for _ in range(MAX_SCHEMAS + 5)]})
    assert many.schema["anyOf"][-1] is True and many.notes


def test_the_depth_of_json_is_not_limited_by_the_stack() -> None:
    nested: Any = 1
    for _ in range(100_000):
        nested = [nested]
    assert json_depth(nested) == 100_001
    assert json_depth({"a": [1, {"b": 2}]}) == 4


def test_recursion_ends() -> None:
    normal = normalised({"properties": {"a": {"$ref": "#"}, "b": {"items": {"$ref": "#/properties/b"}}}})
    waiting, seen = [normal.schema, *normal.definitions.values()], 0
    while waiting:
        seen += 1
        waiting += children(waiting.pop())
    assert seen < 10


def test_names_have_no_text_of_clients_that_is_not_a_plain_word() -> None:
    notes = [Note(("f", "a\r\nb: c", "x" * 65, "ok_1-"), "$ref"), Note((), "schema"), Note((), "schema")]
    assert names(notes) == ["f.unknown.unknown.ok_1-.ref", "schema"]
    for path in (("x" * 60,) * 7, ("y",) * 100, ("é", ",", "")):
        name = f"tools.{Note(path, 'pattern').name}"
        assert NAME.fullmatch(name) and len(name) < MAX_NAME_CHARACTERS + 20


PATTERNS = [(r"^[a-z0-9_.-]+\[\]$", r"^[a-z0-9_.\-]+\[\]$"), ("[^&&~~]", r"[^\&\&\~\~]"), ("[+--]", r"[+-\-]")]
PATTERNS += [(r"[\w-.]", r"[\w\-.]"), ("[a-c-e]", r"[a-c\-e]"), ("[]", r"[^\s\S]"), ("[^]a", "(?s:.)a"), (r"\<a\>", "<a>")]


@pytest.mark.parametrize(("pattern", "written"), [*PATTERNS, ("a\\", "a\\")])
def test_patterns(pattern: str, written: str) -> None:
    assert rust_pattern(pattern) == written


def refusal(schema: Any) -> str:
    """Refuses what contains "bad", and objects with more than two properties."""
    if '"properties"' in str(schema).replace("'", '"') and len(schema.get("properties", ())) > 2:
        return "too large"
    return "bad" if "bad" in str(schema) else ""


def relaxed(schema: Any, **limits: Any) -> tuple[Any, list[str]]:
    normal = normalised(schema)
    relax(normal, refusal, Budget(**limits))
    return normal.standalone, [note.name for note in normal.notes]


def test_only_what_is_refused_is_dropped() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "bad", "minLength": 1}, "b": {"enum": [1]}}}
    schema_after = {"type": "object", "properties": {"a": {"type": "string", "minLength": 1}, "b": {"enum": [1]}}}
    assert relaxed(schema) == (schema_after, ["a.pattern"])
    assert relaxed(schema_after) == (schema_after, [])


def test_a_spent_budget_drops_the_same_keywords_everywhere_or_all() -> None:
    schema = {"type": "object", "properties": {name: {"type": "string", "pattern": "bad"} for name in "ab"}}
    after, names = relaxed(schema, checks=6)
    assert after == {"type": "object", "properties": {name: {"type": "string"} for name in "ab"}}
    assert set(names) == {"a.pattern", "b.pattern"}
    assert relaxed(schema, checks=2) == ({"type": ["object"]}, ["schema"])
    with pytest.raises(Exhausted):
        relaxed(schema, checks=0)


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": ["integer", "null"]}, {"integer", "null"}),
        ({"enum": ["a", "b"]}, TEXT),
        ({"enum": [1, None, True, 1.5, [], {}]}, ANY - TEXT),
        ({"oneOf": [{"type": "string"}, {"type": "array"}]}, {"string", "array"}),
        ({"allOf": [{"type": ["string", "null"]}, {"type": ["string", "array"]}]}, TEXT),
        ({"type": "string", "anyOf": [{"enum": [1]}]}, ANY),
        ({"$ref": "#/$defs/a~1b"}, TEXT),
        ({"$ref": "#/$defs/a~1b", "minLength": 1}, TEXT),
        ({"$ref": "#/$defs/loop"}, ANY),
    ],
)
def test_types(schema: Any, types: set[str]) -> None:
    root = {"properties": {"x": schema}, "$defs": {"a/b": {"type": "string"}, "loop": {"$ref": "#/$defs/loop"}}}
    normal = normalised(root)
    assert types_of(normal.schema["properties"]["x"], normal.definitions) == types


def test_references_that_multiply_are_read_once() -> None:
    level = {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"} for _ in range(20)]} for i in range(15)}
    normal = normalised({"$ref": "#/$defs/a0", "$defs": {**level, "a15": {"type": "string"}}})  # 20 ** 15 paths
    assert types_of(normal.schema, normal.definitions) == TEXT


@pytest.mark.parametrize(
    ("schema", "texts"),
    [
        ({}, Texts(None, 0, None, [])),
        ({"minLength": 1, "allOf": [{"minLength": 2, "maxLength": 5}]}, Texts(None, 2, 5, [])),
        ({"anyOf": [{"const": "a"}, {"enum": ["b", 5, "a"]}]}, Texts(["a", "b"], 0, None, [])),
        ({"enum": ["a", "b"], "allOf": [{"enum": ["b", "c"]}]}, Texts(["b"], 0, None, [])),
        ({"anyOf": [{"const": "a"}, {}], "pattern": "x"}, Texts(None, 0, None, ["pattern", "anyOf"])),
    ],
)
def test_texts(schema: Any, texts: Texts) -> None:
    assert texts_of(normalised(schema).schema, {}) == texts


def test_parts_of_all_of_and_definitions() -> None:
    schema = {"allOf": [{"minLength": 1}, {"$ref": "#/$defs/x"}], "$defs": {"x": {"pattern": "bad", "maxLength": 2}}}
    after, names = relaxed(schema)
    assert after == {"allOf": [{"minLength": 1}, {"$ref": "#/$defs/d0"}], "$defs": {"d0": {"maxLength": 2}}}
    assert names == ["allOf.1.pattern"]


def test_types_last_where_alternatives_are_dropped() -> None:
    after, names = relaxed({"anyOf": [{"enum": ["bad"]}, {"type": "string"}]})
    assert after == {"anyOf": [{"type": ["string"]}, {"type": "string"}]} and names == ["anyOf.0.enum"]
