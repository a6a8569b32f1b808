"""Schemas of objects as clients write them, with what they allow and what no grammar enforces of them."""

from typing import Any, NamedTuple

WORD = {"type": "string"}
SLUG = {"type": "string", "pattern": "^(?!-)[a-z-]{1,20}(?<!-)$"}
CITY = {"type": "object", "properties": {"city": WORD}, "required": ["city"], "additionalProperties": False}


class Member(NamedTuple):
    schema: Any
    valid: tuple[str, ...] = ()
    invalid: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()


def one(schema: Any, **more: Any) -> dict[str, Any]:
    """Objects with one required property, `a`."""
    return {"type": "object", "properties": {"a": schema}, "required": ["a"], "additionalProperties": False, **more}


A_TEXT, A_NUMBER = '{"a": "x"}', '{"a": 5}'
MEMBERS: dict[str, Member] = {
    # what regular expressions of llguidance do not have
    "lookaround": Member(one(SLUG), ('{"a": "-x"}',), (A_NUMBER,), ("a.pattern",)),
    "word edge": Member(one({**WORD, "pattern": r"\bfoo\b"}), (A_TEXT,), (A_NUMBER,), ("a.pattern",)),
    "backreference": Member(one({**WORD, "pattern": r"^(.)\1$", "maxLength": 2}), (A_TEXT,), ('{"a": "abc"}',), ("a.pattern",)),
    "in an array": Member(one({"type": "array", "items": SLUG}), ('{"a": ["-"]}',), ('{"a": [1]}',), ("a.items.pattern",)),
    "in a union": Member(
        one({"anyOf": [SLUG, {"type": "null"}]}), (A_TEXT, '{"a": null}'), (A_NUMBER,), ("a.anyOf.0.pattern",)
    ),
    "of names": Member({"type": "object", "patternProperties": {"(?!x)y": WORD}}, (A_NUMBER,), (), ("patternProperties",)),
    # what they read differently
    "class with bracket": Member(one({**WORD, "pattern": "^[[a]$"}), ('{"a": "["}',), (A_TEXT,)),
    "class with ampersands": Member(one({**WORD, "pattern": "^[a&&b]$"}), ('{"a": "&"}', '{"a": "a"}'), (A_TEXT,)),
    "escaped angle": Member(one({**WORD, "pattern": r"^\<\w+\>$"}), ('{"a": "<b>"}',), (A_TEXT,)),
    # references
    "to a property": Member(
        {"type": "object", "properties": {"from": CITY, "to": {"$ref": "#/properties/from"}}, "required": ["from", "to"]},
        ('{"from": {"city": "a"}, "to": {"city": "b"}}',),
        ('{"from": {"city": "a"}, "to": {}}',),
    ),
    "to the root": Member(
        {"type": "object", "properties": {"v": {"type": "integer"}, "a": {"type": "array", "items": {"$ref": "#"}}}},
        ('{"v": 1, "a": [{"v": 2, "a": []}]}',),
        ('{"a": [{"v": "x"}]}',),
    ),
    "into lists": Member(
        {"type": "object", "properties": {"a": {"$ref": "#/properties/b/anyOf/1"}, "b": {"anyOf": [WORD, CITY]}}},
        ('{"a": {"city": "x"}}',),
        (A_TEXT,),
    ),
    "to an anchor": Member(one({"$ref": "#word"}, **{"$defs": {"x": {"$anchor": "word", **WORD}}}), (A_TEXT,), (A_NUMBER,)),
    "to an id": Member(one({"$ref": "word"}, **{"$defs": {"x": {"$id": "word", **WORD}}}), (A_TEXT,), (A_NUMBER,)),
    "in old drafts": Member(
        {"$schema": "http://json-schema.org/draft-07/schema#", "$ref": "#/definitions/A", "definitions": {"A": one(WORD)}},
        (A_TEXT,),
        (A_NUMBER,),
    ),
    "hiding siblings": Member(
        one({"$ref": "#/definitions/w", "maxLength": 0}, definitions={"w": WORD}), (A_TEXT,), (A_NUMBER,)
    ),
    "with siblings": Member(one({"$ref": "#/$defs/w", "maxLength": 1}, **{"$defs": {"w": WORD}}), (A_TEXT,), ('{"a": "xy"}',)),
    "in a circle": Member(
        one({"$ref": "#/$defs/b"}, **{"$defs": {"b": {"$ref": "#/$defs/c"}, "c": {"$ref": "#/$defs/b"}}}),
        (A_TEXT, A_NUMBER),
        (),
        ("a.ref",),
    ),
    "remote": Member(one({"$ref": "https://x.test/schema"}), (A_TEXT, A_NUMBER), (), ("a.ref",)),
    "dangling": Member(one({"$ref": "#/nowhere"}), (A_TEXT, A_NUMBER), (), ("a.ref",)),
    "dynamic": Member(one({"$dynamicRef": "#w"}), (A_TEXT, A_NUMBER), (), ("a.dynamicRef",)),
    # keywords that no grammar has
    "not": Member(one({"not": {"type": "string"}}), (A_NUMBER,), (), ("a.not",)),
    "if": Member(one(WORD, **{"if": {"required": ["b"]}, "then": {"required": ["c"]}}), (A_TEXT,), (A_NUMBER,), ("if",)),
    "names": Member(
        {"type": "object", "propertyNames": {"maxLength": 3}, "additionalProperties": WORD},
        (A_TEXT,),
        (A_NUMBER,),
        ("propertyNames",),
    ),
    "unknown format": Member(one({**WORD, "format": "jwt"}), (A_TEXT,), (A_NUMBER,), ("a.format",)),
    "overlapping": Member(one({"oneOf": [WORD, {**WORD, "minLength": 3}]}), (A_TEXT,), (A_NUMBER,), ("a.oneOf",)),
    # parts that nothing satisfies, or that are malformed
    "empty range": Member(one({"type": "integer", "minimum": 5, "maximum": 3}), ('{"a": 2}',), (A_TEXT,), ("a.minimum",)),
    "incompatible": Member(one({"allOf": [WORD, {"type": "integer"}, {"maxLength": 1}]}), (A_TEXT,), (A_NUMBER,), ("a.allOf",)),
    "required, but false": Member(one(False), ("{}",), (A_TEXT,), ("required",)),
    "optional, but empty": Member(
        {"type": "object", "properties": {"a": {"enum": []}, "b": WORD}}, ('{"b": "x"}',), (), ("a.enum",)
    ),
    "unknown type": Member(one({"type": "file"}), (A_TEXT, A_NUMBER), (), ("a.type",)),
    "out of range": Member(one({"const": 10**400}), (A_NUMBER,), (A_TEXT,), ("a.enum",)),
    # roots
    "union": Member(
        {"type": "object", "anyOf": [one(WORD), {"type": "object", "properties": {"b": WORD}, "required": ["b"]}]},
        (A_TEXT, '{"b": "x"}'),
        (A_NUMBER,),
    ),
    "merged": Member(
        {"allOf": [{"$ref": "#/$defs/a"}, {"required": ["a"]}], "$defs": {"a": {"properties": {"a": WORD}}}},
        (A_TEXT,),
        (A_NUMBER, "{}"),
    ),
    "record": Member({"type": "object", "additionalProperties": WORD}, (A_TEXT, "{}"), (A_NUMBER,)),
    "list of 2020-12": Member(
        one({"type": "array", "prefixItems": [WORD], "items": {"type": "integer"}}), ('{"a": ["x", 1]}',), ('{"a": [1]}',)
    ),
    # names
    "keywords": Member(
        {"type": "object", "properties": {"from": WORD, "class": WORD}, "required": ["from", "class"]},
        ('{"from": "x", "class": "y"}',),
    ),
    "hyphens": Member(
        {"type": "object", "properties": {"user-id": WORD, "$top": WORD}, "required": ["user-id", "$top"]},
        ('{"user-id": "x", "$top": "y"}',),
    ),
    "odd": Member({"type": "object", "properties": {'a>"=:b': WORD}, "required": ['a>"=:b']}, ('{"a>\\"=:b": "x"}',)),
}
