"""A normalised schema has references of its own only, no annotations, and work and size linear in what was given."""

from __future__ import annotations

import json
from typing import Any

from outrider.server.chat.schemas.normal import MAX_LEVELS, children, normalised, standalone
from outrider.server.chat.schemas.references import MAX_SCHEMAS
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


def test_recursion_ends() -> None:
    normal = normalised({"properties": {"a": {"$ref": "#"}, "b": {"items": {"$ref": "#/properties/b"}}}})
    waiting, seen = [normal.schema, *normal.definitions.values()], 0
    while waiting:
        seen += 1
        waiting += children(waiting.pop())
    assert seen < 10
