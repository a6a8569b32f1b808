"""The keywords of JSON schemas, drafts 4 to 2020-12: where they hold schemas, and which of their values are well formed."""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

TYPES = frozenset({"string", "integer", "number", "boolean", "null", "object", "array"})
# Keywords whose value is a schema, a list of schemas, or an object of schemas.
IN_SCHEMA = (
    "additionalItems",
    "additionalProperties",
    "contains",
    "contentSchema",
    "else",
    "if",
    "items",
    "not",
    "propertyNames",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
)
IN_LIST = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
IN_MAP = ("$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties")
COUNTS = ("maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties")
NUMBERS = ("exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum", "multipleOf")
# Keywords that no grammar can enforce, and values that say nothing.
TRIVIAL: Mapping[str, tuple[Any, ...]] = {
    "$dynamicRef": (),
    "$recursiveRef": (),
    "contains": (),
    "dependencies": ({},),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "not": (False,),
    "propertyNames": (True, {}, {"type": "string"}),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "uniqueItems": (False,),
}
# Constants nested deeper than this are not enforced.
MAX_DATA_DEPTH = 64
# A `$schema` of a draft in which `$ref` hides its siblings.
OLD_REFERENCES = re.compile(r"draft-0?[3-7]\b")


def hides_siblings(root: Any) -> bool:
    """Whether `$ref` is the only keyword that has an effect in the schemas of this root."""
    if not isinstance(root, dict):
        return False
    draft = root.get("$schema")
    is_old = isinstance(draft, str) and OLD_REFERENCES.search(draft) is not None
    return is_old or (draft is None and "definitions" in root and "$defs" not in root)


def subschemas(schema: Mapping[str, Any]) -> Iterator[Any]:
    for keyword, value in schema.items():
        if keyword in IN_SCHEMA and not isinstance(value, list):
            yield value
        elif keyword in IN_LIST and isinstance(value, list):
            yield from value
        elif keyword in IN_MAP and isinstance(value, dict):
            yield from value.values()


def json_depth(value: Any) -> int:
    """Nesting depth of lists and objects."""
    level, levels = [value], 0
    while level:
        inner = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)]
        level = [each for values in inner for each in values]
        levels += 1
    return levels


def is_schema(value: Any) -> bool:
    return isinstance(value, (bool, dict))


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and (isinstance(value, int) or math.isfinite(value))


def plain_value(keyword: str, value: Any) -> Any:
    """The value of a keyword that holds no schemas, as a grammar takes it; None if it is malformed or too deep.

    `const` is returned in a list, as an `enum`.
    """
    match keyword:
        case "type":
            named = [value] if isinstance(value, str) else value
            if not isinstance(named, list) or not named or not all(isinstance(each, str) and each in TYPES for each in named):
                return None
            return value if isinstance(value, str) else list(dict.fromkeys(named))
        case "enum" | "const":
            values = [value] if keyword == "const" else value
            return values if isinstance(values, list) and values and json_depth(values) <= MAX_DATA_DEPTH else None
        case "required":
            return list(dict.fromkeys(value)) if isinstance(value, list) and all(isinstance(s, str) for s in value) else None
        case "pattern" | "format":
            return value if isinstance(value, str) else None
    if keyword in COUNTS:
        return int(value) if is_number(value) and value >= 0 and value == int(value) else None
    return value if is_number(value) and (keyword != "multipleOf" or value > 0) else None


def limits(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The bounds of numbers, of which draft 4's booleans become numbers."""
    found = {keyword: schema[keyword] for keyword in NUMBERS if keyword in schema}
    for exclusive, inclusive in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(found.get(exclusive), bool) and found.pop(exclusive) and inclusive in found:
            found[exclusive] = found.pop(inclusive)
    return found


def unenforced(schema: Mapping[str, Any]) -> Iterator[str]:
    """The keywords with effect that no grammar can enforce."""
    for keyword, trivial in TRIVIAL.items():
        if keyword in schema and schema[keyword] not in trivial:
            yield keyword
    if "if" in schema and ("then" in schema or "else" in schema):
        yield "if"
