"""The types that schemas allow, also with references that lead in circles, in time linear in the schema."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.server.chat.tools.schemas import ANY, TEXT, standalone, types_of


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, TEXT),
        ({"type": ["integer", "null"]}, {"integer", "null"}),
        ({"enum": ["a", "b"]}, TEXT),
        ({"enum": [1, None, True, 1.5, [], {}]}, ANY - TEXT),
        ({"const": 2.0}, {"number", "integer"}),
        ({"oneOf": [{"type": "string"}, {"type": "array"}]}, {"string", "array"}),
        ({"type": "string", "anyOf": [{"enum": [1]}]}, ANY),
        ({"$ref": "#/$defs/a~1b"}, TEXT),
        ({"$ref": "#/$defs/loop"}, ANY),
        ({}, ANY),
        (True, ANY),
        (None, ANY),
    ],
)
def test_types(schema: Any, types: set[str]) -> None:
    root = {"$defs": {"a/b": {"type": "string"}, "loop": {"$ref": "#/$defs/loop"}}}
    assert types_of(schema, root) == types


def test_references_that_multiply_are_read_once() -> None:
    level = {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 20} for i in range(15)}
    root = {"$defs": {**level, "a15": {"type": "string"}}}  # 20 ** 15 paths
    assert types_of({"$ref": "#/$defs/a0"}, root) == TEXT


def test_definitions_are_only_copied_where_they_are_used() -> None:
    root: dict[str, Any] = {"$defs": {"a": {}}, "properties": {}}
    assert standalone({"type": "string"}, root) == {"type": "string"}
    assert standalone({"$ref": "#/$defs/a"}, root) == {"$ref": "#/$defs/a", "$defs": {"a": {}}}
