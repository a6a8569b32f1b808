"""Schemas of objects as clients write them, with what they allow and what no grammar enforces of them."""

from __future__ import annotations

from typing import Any, NamedTuple

WORD = {"type": "string"}
SLUG = {"type": "string", "pattern": "^(?!-)[a-z-]{1,20}(?<!-)$"}
CITY = {"type": "object", "properties": {"city": WORD}, "required": ["city"], "additionalProperties": False}


class Member(NamedTuple):
    """A schema of objects."""

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
    "class with hyphens": Member(one({**WORD, "pattern": "^[+--]$"}), ('{"a": ","}',), (A_TEXT,)),
    "escaped angle": Member(one({**WORD, "pattern": r"^\<\w+\>$"}), ('{"a": "<b>"}',), (A_TEXT,)),
    # references
    "to a property": Member(
        {"type": "object", "properties": {"from": CITY, "to": {"$ref": "#/properties/from"}}, "required": ["from", "to"]},
        ('{"from": {"city": "a"}, "to": {"city": "b"}}',),
        ('{"from": {"city": "a"}, "to": {}}',),
    ),
    "named like the call's": Member(
        {"type": "object", "properties": {"name": WORD, "a": {"$ref": "#/properties/name"}}, "required": ["name", "a"]},
        ('{"name": "x", "a": "y"}',),
        ('{"name": "x", "a": 5}',),
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
    "with escapes": Member(one({"$ref": "#/$defs/a~1b%25"}, **{"$defs": {"a/b%": WORD}}), (A_TEXT,), (A_NUMBER,)),
    "to an anchor": Member(one({"$ref": "#word"}, **{"$defs": {"x": {"$anchor": "word", **WORD}}}), (A_TEXT,), (A_NUMBER,)),
    "to an id": Member(
        {"$id": "http://x.test/root", **one({"$ref": "word.json"}, **{"$defs": {"x": {"$id": "/word.json", **WORD}}})},
        (A_TEXT,),
        (A_NUMBER,),
    ),
    "relative to an id": Member(
        one(
            {"$ref": "inner#/$defs/b"},
            **{"$defs": {"x": {"$id": "inner", "$ref": "#/$defs/b", "$defs": {"b": WORD}}, "b": {"type": "integer"}}},
        ),
        (A_TEXT,),
        (A_NUMBER,),
    ),
    "in old drafts": Member(
        {"$schema": "http://json-schema.org/draft-07/schema#", "$ref": "#/definitions/A", "definitions": {"A": one(WORD)}},
        (A_TEXT,),
        (A_NUMBER,),
    ),
    "hiding siblings": Member(
        one({"$ref": "#/definitions/w", "maxLength": 0}, definitions={"w": WORD}), (A_TEXT,), (A_NUMBER,)
    ),
    "with siblings": Member(one({"$ref": "#/$defs/w", "maxLength": 1}, **{"$defs": {"w": WORD}}), (A_TEXT,), ('{"a": "xy"}',)),
    "to references": Member(
        one({"$ref": "#/$defs/b"}, **{"$defs": {"b": {"$ref": "#/$defs/c"}, "c": {"$ref": "#/$defs/d"}, "d": WORD}}),
        (A_TEXT,),
        (A_NUMBER,),
    ),
    "in a circle": Member(
        one({"$ref": "#/$defs/b"}, **{"$defs": {"b": {"$ref": "#/$defs/c"}, "c": {"$ref": "#/$defs/b"}}}),
        (A_TEXT, A_NUMBER),
        (),
        ("a.ref",),
    ),
    "in a circle with siblings": Member(
        one({"$ref": "#/$defs/b"}, **{"$defs": {"b": {"minLength": 1, "allOf": [{"$ref": "#/$defs/b"}]}}}),
        (A_TEXT,),
        (),
        ("a.allOf.0.ref",),
    ),
    "remote": Member(one({"$ref": "https://x.test/schema"}), (A_TEXT, A_NUMBER), (), ("a.ref",)),
    "dangling": Member(one({"$ref": "#/nowhere"}), (A_TEXT, A_NUMBER), (), ("a.ref",)),
    "dynamic": Member(one({"$dynamicRef": "#w"}, **{"$defs": {"x": {"$dynamicAnchor": "w", **WORD}}}), (A_TEXT,), (A_NUMBER,)),
    "that are names": Member(
        {"type": "object", "properties": {"$ref": WORD, "$id": WORD, "enum": WORD}, "required": ["$ref"]},
        ('{"$ref": "x"}',),
        ('{"$ref": 5}',),
    ),
    "in data": Member(
        one({"enum": [{"$ref": "#/nowhere"}], "default": {"$ref": "#/x"}}), ('{"a": {"$ref": "#/nowhere"}}',), (A_TEXT,)
    ),
    # keywords that no grammar has
    "not": Member(one({"not": {"type": "string"}}), (A_NUMBER,), (), ("a.not",)),
    "if": Member(one(WORD, **{"if": {"required": ["b"]}, "then": {"required": ["c"]}}), (A_TEXT,), (A_NUMBER,), ("if",)),
    "contains": Member(
        one({"type": "array", "contains": {}, "uniqueItems": True}), ('{"a": [1]}',), (A_TEXT,), ("a.contains", "a.uniqueItems")
    ),
    "dependencies": Member(one(WORD, dependentRequired={"a": ["b"]}), (A_TEXT,), (A_NUMBER,), ("dependentRequired",)),
    "names": Member(
        {"type": "object", "propertyNames": {"maxLength": 3}, "additionalProperties": WORD},
        (A_TEXT,),
        (A_NUMBER,),
        ("propertyNames",),
    ),
    "names that are texts": Member(
        {"type": "object", "propertyNames": WORD, "additionalProperties": WORD}, (A_TEXT,), (A_NUMBER,)
    ),
    "number of properties": Member(
        {"type": "object", "properties": {"a": WORD, "b": WORD}, "minProperties": 1}, (A_TEXT,), (A_NUMBER,), ("minProperties",)
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
    "required in its property": Member(one({**WORD, "required": True}), (A_TEXT,), (A_NUMBER,), ("a.required",)),
    "booleans": Member(
        {"type": "object", "properties": {"a": True, "b": False}, "required": ["a"]}, (A_TEXT,), ('{"a": 1, "b": 1}',)
    ),
    "out of range": Member(one({"const": 10**400}), (A_NUMBER,), (A_TEXT,), ("a.enum",)),
    "counts that are floats": Member(one({**WORD, "maxLength": 2.0}), (A_TEXT,), ('{"a": "xyz"}',)),
    "exclusive bounds of draft 4": Member(
        one({"type": "integer", "minimum": 5, "exclusiveMinimum": True}), ('{"a": 6}',), (A_NUMBER,)
    ),
    # roots
    "union": Member(
        {"type": "object", "anyOf": [one(WORD), {"type": "object", "properties": {"b": WORD}, "required": ["b"]}]},
        (A_TEXT, '{"b": "x"}'),
        (A_NUMBER,),
    ),
    "one of two": Member(
        {"type": "object", "properties": {"a": WORD, "b": WORD}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        (A_TEXT, '{"b": "x"}'),
        ("{}", A_NUMBER),
    ),
    "merged": Member(
        {"allOf": [{"$ref": "#/$defs/a"}, {"required": ["a"]}], "$defs": {"a": {"properties": {"a": WORD}}}},
        (A_TEXT,),
        (A_NUMBER, "{}"),
    ),
    "pattern and union": Member(
        {"patternProperties": {"^a": WORD}, "anyOf": [{"minProperties": 1}, {}], "additionalProperties": False},
        (A_TEXT,),
        ('{"b": "x"}',),
    ),
    "record": Member({"type": "object", "additionalProperties": WORD}, (A_TEXT, "{}"), (A_NUMBER,)),
    "anything": Member({"type": "object"}, (A_TEXT, "{}"), ("5",)),
    "draft 4's list": Member(
        one({"type": "array", "items": [WORD, {"type": "integer"}], "additionalItems": False}),
        ('{"a": ["x", 1]}',),
        ('{"a": ["x", 1, 2]}',),
    ),
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
