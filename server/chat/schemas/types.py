"""Reads the types of values and the limits of texts from normalised schemas, each once."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from outrider.server.chat.schemas.keywords import TYPES
from outrider.server.chat.schemas.normal import definition_of

ANY = TYPES
TEXT = frozenset({"string"})
# Keywords of texts that a grammar of plain text does not enforce.
OF_TEXTS = frozenset({"anyOf", "format", "oneOf", "pattern"})
Definitions = Mapping[str, Any]


def resolved(schema: Any, definitions: Definitions) -> Any:
    """The definition that a mere reference stands for; the schema itself if it is none."""
    name = definition_of(schema)
    return definitions[name] if name is not None and len(schema) == 1 else schema


def parts(schema: Any, definitions: Definitions) -> Iterator[Mapping[str, Any]]:
    """The schemas that apply together: this one, what it refers to, and all of `allOf`; each once. Booleans are left out."""
    waiting, seen = [schema], set[int]()
    while waiting:
        each = waiting.pop(0)
        if isinstance(each, dict) and id(each) not in seen:
            seen.add(id(each))
            yield each
            name = definition_of(each)
            waiting += [] if name is None else [definitions[name]]
            waiting += each.get("allOf", ())


def types_of(schema: Any, definitions: Definitions, known: dict[int, frozenset[str]] | None = None) -> frozenset[str]:
    """The JSON types that a schema allows; any if it allows none. `known`: results by the schemas' identity."""
    known = {} if known is None else known
    if id(schema) in known:
        return known[id(schema)]
    known[id(schema)] = allowed = ANY
    for part in parts(schema, definitions):
        if "type" in part:
            declared = {part["type"]} if isinstance(part["type"], str) else set(part["type"])
            allowed &= declared | ({"integer"} if "number" in declared else set())
        if "enum" in part:
            allowed &= frozenset().union(*map(types_of_value, part["enum"]))
        for alternatives in (part.get("anyOf"), part.get("oneOf")):
            if alternatives:
                allowed &= frozenset().union(*(types_of(each, definitions, known) for each in alternatives))
    known[id(schema)] = allowed or ANY
    return known[id(schema)]


def types_of_value(value: Any) -> frozenset[str]:
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


@dataclass(frozen=True)
class Texts:
    values: list[str] | None  # all of them; None = any
    least: int  # characters
    most: int | None
    unenforced: list[str]  # keywords that are not considered


def texts_of(schema: Any, definitions: Definitions) -> Texts:
    values: list[str] | None = None
    least, most, unenforced = 0, None, dict[str, None]()
    for part in parts(schema, definitions):
        least = max(least, part.get("minLength", 0))
        most = min((each for each in (most, part.get("maxLength")) if each is not None), default=None)
        listed = listed_texts(part)
        if listed is not None:
            values = listed if values is None else [value for value in values if value in listed]
        covered = () if "enum" in part or listed is None else ("anyOf", "oneOf")
        unenforced |= dict.fromkeys(keyword for keyword in part if keyword in OF_TEXTS and keyword not in covered)
    return Texts(values, least, most, list(unenforced))


def listed_texts(part: Mapping[str, Any]) -> list[str] | None:
    """The texts of an `enum`, or of alternatives that each have one; None if there are others."""
    alternatives = [part] if "enum" in part else part.get("anyOf", part.get("oneOf"))
    if not alternatives or not all(isinstance(each, dict) and "enum" in each for each in alternatives):
        return None
    values = [value for each in alternatives for value in each["enum"] if isinstance(value, str)]
    return list(dict.fromkeys(values))
