"""The types that schemas allow, also with references that lead in circles, in time linear in the schema."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.server.chat.schemas.normal import normalised
from outrider.server.chat.schemas.types import ANY, TEXT, Texts, texts_of, types_of


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
