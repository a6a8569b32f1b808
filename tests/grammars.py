"""Schemas of objects, and hostile grammars: each overflows the stack of a recursive compiler if `size` is large enough."""

import json
from typing import Any


def record(**properties: Any) -> dict[str, Any]:
    """A schema of objects with exactly these properties."""
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def rule_chain(size: int) -> str:
    """Lark rules, each of which is the next one."""
    return "\n".join(["start: a0", *(f"a{i}: a{i + 1}" for i in range(size)), f'a{size}: "x"'])


def terminal_chain(size: int) -> str:
    """Lark terminals, each of which contains the next one."""
    return "\n".join(["start: A0", *(f'A{i}: "b" | "q" A{i + 1}' for i in range(size)), f'A{size}: "x"'])


def nested_grammars(size: int) -> str:
    """A grammar with the chain of rules in an inner grammar."""
    return f"start: %lark {{\n{rule_chain(size)}\n}}"


def reference_chain(size: int, link: str = "items") -> dict[str, Any]:
    """A JSON schema whose definitions refer to each other, as `items`, `anyOf`, `properties` or directly as `$ref`."""

    def definition(number: int) -> dict[str, Any]:
        target = {"$ref": f"#/$defs/a{number}"}
        links: dict[str, dict[str, Any]] = {
            "$ref": target,
            "items": {"type": "array", "items": target},
            "anyOf": {"anyOf": [{"type": "string"}, target]},
            "allOf": {"allOf": [target]},
            "properties": {"type": "object", "properties": {"b": target}, "additionalProperties": False},
        }
        return links[link]

    definitions: dict[str, Any] = {f"a{i}": definition(i + 1) for i in range(size)}
    return {"$ref": "#/$defs/a0", "$defs": {**definitions, f"a{size}": {"type": "integer"}}}


def json_grammar(schema: dict[str, Any]) -> str:
    """A Lark grammar of the texts that match the schema."""
    return f"start: %json {json.dumps(schema)}"
