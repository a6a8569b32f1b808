"""What JSON schemas say about the types of arguments. Unknown and malformed parts of a schema allow any type."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

ANY = frozenset({"string", "integer", "number", "boolean", "null", "object", "array"})
TEXT = frozenset({"string"})
# References and alternatives nested deeper than this are not restricted.
MAX_DEPTH = 16
DEFINITIONS = ("$defs", "definitions")


def properties_of(parameters: Any) -> dict[str, Any]:
    """The schemas of a function's parameters, by name."""
    found = parameters.get("properties") if isinstance(parameters, dict) else None
    return found if isinstance(found, dict) else {}


def resolved(schema: Any, root: Any) -> Any:
    """The schema that a schema with a local reference refers to."""
    for _ in range(MAX_DEPTH):
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        schema = root
        for step in reference[2:].split("/"):
            schema = schema.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(schema, dict) else None
    return schema


def types_of(schema: Any, root: Any) -> frozenset[str]:
    """The JSON types that `schema` allows. `root` is the schema that its references start from."""
    return find_types(schema, root, {}, 0)


def find_types(schema: Any, root: Any, known: dict[int, frozenset[str]], depth: int) -> frozenset[str]:
    """`types_of`, with the results for the schemas met so far, by identity, so that each is read once."""
    schema = resolved(schema, root)
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        return ANY
    if id(schema) in known:
        return known[id(schema)]
    known[id(schema)] = allowed = ANY
    declared = schema.get("type")
    if isinstance(declared, (str, list)):
        allowed &= {declared} if isinstance(declared, str) else {each for each in declared if isinstance(each, str)}
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        allowed &= frozenset().union(*map(types_of_value, values))
    for alternatives in (schema.get("anyOf"), schema.get("oneOf")):
        if isinstance(alternatives, list) and alternatives:
            allowed &= frozenset().union(*(find_types(each, root, known, depth + 1) for each in alternatives))
    known[id(schema)] = allowed = allowed or ANY
    return allowed


def texts_of(schema: Mapping[str, Any]) -> list[str] | None:
    """The texts that `enum` or `const` allow; None if the schema has neither."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return [value for value in values if isinstance(value, str)] if isinstance(values, list) else None


def types_of_value(value: Any) -> frozenset[str]:
    """The JSON types of a decoded value."""
    match value:
        case bool():
            return frozenset({"boolean"})
        case None:
            return frozenset({"null"})
        case int():
            return frozenset({"integer", "number"})
        case float():
            return frozenset({"number", "integer"} if value.is_integer() else {"number"})
        case str():
            return TEXT
    return frozenset({"object" if isinstance(value, dict) else "array"})


def standalone(schema: Any, root: Any) -> dict[str, Any]:
    """The schema of one argument as a schema of its own, with the definitions that it may refer to."""
    refers = "$ref" in json.dumps(schema)
    definitions = {name: root[name] for name in DEFINITIONS if refers and name in root}
    return {**definitions, **(schema if isinstance(schema, dict) else {})}


def arguments(name: str, parameters: Any) -> Iterator[tuple[str, Any, bool]]:
    """A function's arguments: name, schema, and whether it is required; the required ones first. Raises ValueError."""
    properties, required = parameters.get("properties", {}), parameters.get("required", [])
    if not isinstance(properties, dict) or not all(isinstance(each, dict) for each in properties.values()):
        raise ValueError(f"the 'properties' of {name!r} must be an object of schemas.")
    if not isinstance(required, list) or not all(isinstance(each, str) for each in required):
        raise ValueError(f"'required' of {name!r} must be a list of names.")
    for each in dict.fromkeys((*required, *properties)):
        yield each, properties.get(each, {}), each in required
