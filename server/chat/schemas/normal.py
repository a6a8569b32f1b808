"""One form of all JSON schemas: of the draft 2020-12, without annotations, its references `#/$defs/...` of its own.

A normalised schema allows what the given one allows, or more, and names what it leaves out. Every schema that something refers
to becomes one definition, so the work and the result are linear in the input. Does not know whether a grammar can enforce the
keywords that it keeps.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from outrider.server.chat.schemas.keywords import COUNTS, NUMBERS, hides_siblings, is_schema, limits, plain_value, unenforced
from outrider.server.chat.schemas.notes import Note, Path
from outrider.server.chat.schemas.references import MAX_SCHEMAS, References

# Schemas nested deeper than this, also through references, are not restricted. A compiler that recurses survives it.
MAX_LEVELS = 100
PREFIX = "#/$defs/"
# Keywords that llguidance applies one by one, and all that it can enforce.
APPLICATORS = ("const", "enum", "allOf", "anyOf", "oneOf")
KEPT = frozenset(
    {
        *APPLICATORS,
        *COUNTS,
        "additionalProperties",
        "exclusiveMaximum",
        "exclusiveMinimum",
        "format",
        "items",
        "maximum",
        "minimum",
        "multipleOf",
        "pattern",
        "patternProperties",
        "prefixItems",
        "properties",
        "required",
        "type",
    }
)
MALFORMED = "it is malformed"


@dataclass
class Normal:
    schema: Any  # a boolean, or an object without `$defs`
    definitions: dict[str, Any] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)  # what was left out
    paths: dict[int, Path] = field(default_factory=dict)  # of the schemas by identity

    @property
    def standalone(self) -> dict[str, Any]:
        """The schema with its definitions, as one object."""
        return standalone(self.schema, self.definitions)


def standalone(schema: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    found = as_object(schema)
    used = reachable(found, definitions)
    return {**found, "$defs": {name: definitions[name] for name in used}} if used else found


def as_object(schema: Any) -> dict[str, Any]:
    return schema if isinstance(schema, dict) else {} if schema else {"anyOf": [False]}


def children(schema: Any) -> Iterator[Any]:
    for keyword, value in schema.items() if isinstance(schema, dict) else ():
        if keyword in ("properties", "patternProperties"):
            yield from value.values()
        elif keyword in ("allOf", "anyOf", "oneOf", "prefixItems"):
            yield from value
        elif keyword in ("additionalProperties", "items"):
            yield value


def definition_of(schema: Any) -> str | None:
    """The name of the definition that a normalised schema refers to."""
    reference = schema.get("$ref") if isinstance(schema, dict) else None
    return None if reference is None else str(reference).removeprefix(PREFIX)


def reachable(schema: Any, definitions: dict[str, Any]) -> list[str]:
    """The names of the definitions that a schema refers to, also through others."""
    used: dict[str, None] = {}
    waiting = [schema]
    while waiting:
        each = waiting.pop()
        waiting += children(each)
        name = definition_of(each)
        if name is not None and name not in used:
            used[name] = None
            waiting.append(definitions[name])
    return list(used)


def normalised(schema: Any) -> Normal:
    normaliser = Normaliser(schema)
    normal = normaliser.normal
    normal.schema = normaliser.read(schema, (), 0)
    name = definition_of(normal.schema)
    if name is not None and len(normal.schema) == 1:  # the root is easier to read in place
        normal.schema = normal.definitions[name]
        if isinstance(normal.schema, dict):
            normal.schema = dict(normal.schema)
            normal.paths[id(normal.schema)] = ()
    return normal


def of_objects(schema: Any) -> Normal:
    """The schema of a function's parameters in the one form, restricted to objects."""
    normal = normalised(schema)
    written = normal.schema if isinstance(normal.schema, dict) else {}
    types = written.get("type", "object")
    if normal.schema is False or "object" not in ([types] if isinstance(types, str) else types):
        normal.notes.append(Note((), "type", "parameters are an object"))
    normal.schema = {"type": "object", **{keyword: value for keyword, value in written.items() if keyword != "type"}}
    normal.paths[id(normal.schema)] = ()
    return normal


class Normaliser:
    """Writes the schemas of one root."""

    def __init__(self, root: Any) -> None:
        self.normal = Normal(True)
        self._references = References(root)
        self._hides_siblings = hides_siblings(root)
        self._names: dict[int, str] = {}  # names of definitions by the identity of what they define
        self._count = 0

    def read(self, schema: Any, path: Path, level: int) -> Any:
        """A schema in the one form. `level`: how many schemas contain it."""
        if isinstance(schema, bool):
            return schema
        self._count += 1
        if not isinstance(schema, dict):
            return self._any(path, MALFORMED)
        if level > MAX_LEVELS and id(schema) not in self._names:
            return self._any(path, f"it is nested deeper than {MAX_LEVELS} levels")
        if self._count > MAX_SCHEMAS:
            return self._any(path, f"more than {MAX_SCHEMAS} schemas are too many")
        if id(schema) in self._references.targets:
            return self._defined(schema, path, level)
        return self._body(schema, path, level)

    def _any(self, path: Path, reason: str) -> bool:
        self.normal.notes.append(Note(path, "schema", reason))
        return True

    def _defined(self, schema: dict[str, Any], path: Path, level: int) -> Any:
        """A reference to the definition of a schema; the schema itself where it is a boolean."""
        end = self._end(schema, path)
        if isinstance(end, bool):
            return end
        if id(end) not in self._names:
            name = self._names[id(end)] = f"d{len(self._names)}"
            self.normal.definitions[name] = {}  # keeps the order
            self.normal.definitions[name] = self._body(end, path, level)
        reference = {"$ref": PREFIX + self._names[id(end)]}
        self.normal.paths[id(reference)] = path
        return reference

    def _end(self, schema: Any, path: Path) -> Any:
        """The schema at the end of a chain of references; True, and a note, if the chain never ends."""
        seen: set[int] = set()
        while isinstance(schema, dict) and id(schema) not in seen:
            seen.add(id(schema))
            following = self._references.target(schema) if self._is_mere_reference(schema) else None
            if following is None:
                return schema
            schema = following
        if isinstance(schema, dict):
            self.normal.notes.append(Note(path, "$ref", "it refers to itself"))
            return True
        return schema

    def _is_mere_reference(self, schema: dict[str, Any]) -> bool:
        """Whether a schema has a `$ref` and no other keyword that a grammar could enforce."""
        return "$ref" in schema and (self._hides_siblings or not any(keyword in schema for keyword in KEPT))

    def _body(self, schema: dict[str, Any], path: Path, level: int) -> Any:
        """A schema, whether or not something refers to it."""
        if "$ref" in schema and self._hides_siblings:
            schema = {"$ref": schema["$ref"]}
        written: dict[str, Any] = {}
        self.normal.paths[id(written)] = path
        simple = {keyword: value for keyword, value in schema.items() if keyword not in NUMBERS}
        for keyword, value in (simple | limits(schema) | self._items(schema)).items():
            if keyword in KEPT and keyword not in APPLICATORS:
                self._write(written, keyword, value, path, level)
        # llguidance reads keywords in order, and those of objects and arrays only together where nothing stands between them.
        for keyword in schema:
            if keyword in APPLICATORS:
                self._write(written, keyword, schema[keyword], path, level)
        self.normal.notes += [Note(path, keyword) for keyword in unenforced(schema)]
        return self._with_reference(written, schema, path, level) if "$ref" in schema else written

    def _items(self, schema: dict[str, Any]) -> dict[str, Any]:
        """`prefixItems` and `items` of 2020-12 where older drafts have a list in `items`."""
        if isinstance(schema.get("items"), list):
            return {"prefixItems": schema["items"], "items": schema.get("additionalItems", True)}
        return {}

    def _write(self, written: dict[str, Any], keyword: str, value: Any, path: Path, level: int) -> None:
        """Writes a keyword, or notes that it is malformed."""

        def inner(schema: Any, *words: str) -> Any:
            return self.read(schema, (*path, *words), level + 1)

        if keyword in ("properties", "patternProperties"):
            words = (keyword,) if keyword == "patternProperties" else ()
            if isinstance(value, dict):
                patterns = keyword == "patternProperties"
                value = {rust_pattern(name) if patterns else name: inner(each, *words, name) for name, each in value.items()}
            else:
                value = None
        elif keyword in ("allOf", "anyOf", "oneOf", "prefixItems"):
            if value == [] and keyword == "prefixItems":
                return
            is_list = isinstance(value, list) and bool(value)
            value = [inner(each, keyword, str(number)) for number, each in enumerate(value)] if is_list else None
        elif keyword in ("additionalProperties", "items"):
            value = inner(value, keyword) if is_schema(value) else None
        else:
            value = plain_value(keyword, value)
            keyword = "enum" if keyword == "const" else keyword
        if value is None:
            self.normal.notes.append(Note(path, keyword, MALFORMED))
        elif keyword == "allOf" or keyword in written:  # `const` and `enum` are both an `enum`
            written.setdefault("allOf", []).extend(value if keyword == "allOf" else [{keyword: value}])
        else:
            written[keyword] = rust_pattern(value) if keyword == "pattern" else value

    def _with_reference(self, written: dict[str, Any], schema: dict[str, Any], path: Path, level: int) -> Any:
        target = self._references.target(schema)
        if target is None:
            self.normal.notes.append(Note(path, "$ref", "what it refers to is not in the schema"))
            return written
        found = self.read(target, path, level + 1)
        if isinstance(found, dict):
            written |= found
        elif found is False:
            written.setdefault("allOf", []).append(False)
        return written


# The crate reads these escapes as the edges of a word.
PLAIN_ESCAPES = "<>"


def rust_pattern(pattern: str) -> str:
    """A schema's regular expression, which is ECMAScript's, as Rust's regex crate reads it.

    What the crate would read differently in silence is written unambiguously: character classes, where it has set operations
    and nested classes, and escapes. What only ECMAScript has stays, and is refused where the regex is compiled.
    """
    written, at = [], 0
    while at < len(pattern):
        if pattern[at] == "[":
            text, at = character_class(pattern, at)
        else:
            text, at = one_character(pattern, at)
        written.append(text)
    return "".join(written)


def one_character(pattern: str, at: int) -> tuple[str, int]:
    """The character or escape at a position, and the position after it."""
    if pattern[at] != "\\":
        return pattern[at], at + 1
    escaped = pattern[at + 1 : at + 2]
    return (escaped if escaped and escaped in PLAIN_ESCAPES else f"\\{escaped}"), at + 2


def character_class(pattern: str, at: int) -> tuple[str, int]:
    """The class that begins at a position, and the position after it."""
    written = "[^" if pattern.startswith("[^", at) else "["
    at += len(written)
    if pattern.startswith("]", at):  # an empty class matches nothing, and its complement everything
        return ("(?s:.)" if written == "[^" else r"[^\s\S]"), at + 1
    begins_range = False  # whether a hyphen here would make a range
    while at < len(pattern) and pattern[at] != "]":
        if pattern[at] == "-" and begins_range and not pattern.startswith("]", at + 1):
            end, at = class_member(pattern, at + 1)
            written, begins_range = f"{written}-{end}", False
            continue
        single = pattern[at] != "\\" or pattern[at + 1 : at + 2] not in "dDsSwWpP"
        member, at = class_member(pattern, at)
        written, begins_range = written + member, single
    return written + pattern[at : at + 1], at + 1


def class_member(pattern: str, at: int) -> tuple[str, int]:
    """The member of a class at a position, and the position after it."""
    text, at = one_character(pattern, at)
    return (f"\\{text}" if text in ("[", "&", "~", "-") else text), at
