"""The arguments of a function, one by one, for formats that do not write them as a JSON object.

Of a schema of objects, an alternative says which properties there are; `allOf` is merged. Knows nothing about formats.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.server.chat.schemas.normal import Normal, definition_of
from outrider.server.chat.schemas.types import ANY, Definitions, types_of

# A schema of more alternatives is not read.
MAX_ALTERNATIVES = 8
MAX_DEPTH = 16


@dataclass(frozen=True)
class Fields:
    """The properties of one alternative."""

    properties: Mapping[str, Any] = field(default_factory=dict)  # schemas by name
    required: tuple[str, ...] = ()
    others: Any = None  # the schema of other properties; None = the schema says nothing about them

    def __iter__(self) -> Iterator[tuple[str, Any, bool]]:
        """Name, schema, and whether it is required; the required ones first. One that no value can have is left out."""
        for name in dict.fromkeys((*self.required, *self.properties)):
            schema = self.properties.get(name, True if self.others in (None, False) else self.others)
            if schema is not False or name in self.required:
                yield name, schema, name in self.required

    @property
    def more(self) -> Any:
        """The schema of undeclared properties; False if there are none.

        A schema that declares some and says nothing about others means these.
        """
        return not self.properties and not self.required if self.others is None else self.others


def fields_of(schema: Any, definitions: Definitions) -> list[Fields] | None:
    """The alternatives of a schema of objects; None if there are too many, or if it refers to itself."""
    return FieldReader(definitions).read(schema)


class FieldReader:
    """Reads each schema once."""

    def __init__(self, definitions: Definitions) -> None:
        self._definitions = definitions
        self._known: dict[int, list[Fields] | None] = {}  # by the schemas' identity
        self._types: dict[int, frozenset[str]] = {}

    def read(self, schema: Any, depth: int = 0) -> list[Fields] | None:
        if not isinstance(schema, dict):
            return [Fields()]
        if id(schema) not in self._known:
            self._known[id(schema)] = None
            self._known[id(schema)] = None if depth > MAX_DEPTH else self._read(schema, depth)
        return self._known[id(schema)]

    def _read(self, schema: dict[str, Any], depth: int) -> list[Fields] | None:
        others = True if "patternProperties" in schema else schema.get("additionalProperties")
        found: list[Fields] | None = [Fields(schema.get("properties", {}), tuple(schema.get("required", ())), others)]
        name = definition_of(schema)
        for each in ([] if name is None else [self._definitions[name]]) + list(schema.get("allOf", ())):
            found = products(found, self.read(each, depth + 1))
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                found = products(found, self._alternatives(schema[keyword], depth + 1))
        return found

    def _alternatives(self, schemas: Sequence[Any], depth: int) -> list[Fields] | None:
        found: list[Fields] = []
        for schema in schemas:
            if schema is False or "object" not in types_of(schema, self._definitions, self._types):
                continue
            read = self.read(schema, depth)
            if read is None:
                return None
            found += [each for each in read if each not in found]
            if len(found) > MAX_ALTERNATIVES:
                return None
        return found or [Fields()]


def products(first: list[Fields] | None, second: list[Fields] | None) -> list[Fields] | None:
    """Every alternative of one together with every one of the other; None if there are too many."""
    if first is None or second is None or len(first) * len(second) > MAX_ALTERNATIVES:
        return None
    return [merged(one, other) for one in first for other in second]


def merged(one: Fields, other: Fields) -> Fields:
    """The properties of objects that both allow."""
    names = dict.fromkeys((*one.properties, *other.properties))
    properties = {name: both(one.properties.get(name, one.others), other.properties.get(name, other.others)) for name in names}
    required = tuple(dict.fromkeys((*one.required, *other.required)))
    return Fields(properties, required, both(one.others, other.others))


def both(one: Any, other: Any) -> Any:
    """The schema of values that two schemas allow. None says nothing."""
    if one is False or other is False:
        return False
    if one in (None, True) or one == other:
        return one if other is None else other
    return one if other in (None, True) else {"allOf": [one, other]}


class ArgumentTypes:
    """The types of a function's arguments, in any of the alternatives."""

    def __init__(self, normal: Normal) -> None:
        self._fields = fields_of(normal.schema, normal.definitions)
        self._definitions = normal.definitions

    def __getitem__(self, name: str) -> frozenset[str]:
        found = frozenset[str]()
        for fields in self._fields or ():
            schema = fields.properties.get(name, fields.others)
            if schema is not False:
                found |= types_of(schema, self._definitions)
        return found or ANY
