"""Relaxes a normalised schema until its grammar is accepted: drops as few keywords as it finds, and notes each.

Finds them by compiling parts, so it needs no list of what a compiler supports. Promises bounded work: when the budget is spent,
nothing of the schema but its type is left.
"""

import time
from collections.abc import Callable
from typing import Any

from outrider.server.chat.schemas.normal import KEPT, Normal, children, standalone
from outrider.server.chat.schemas.notes import Note
from outrider.server.chat.schemas.types import ANY, types_of

MAX_CHECKS = 4000
# The processor time of all checks. A validator has more, since one check may take long.
BUDGET_SECONDS = 0.8
WHOLE = "schema"
# Keywords are tried in this order, the rest after them; what comes first is kept if two exclude each other.
ORDER = ("type", "enum", "properties", "patternProperties", "required", "prefixItems", "$ref", "allOf", "anyOf")
# Without these keywords, others would allow less.
NEEDS = {"additionalProperties": ("properties", "patternProperties"), "items": ("prefixItems",)}
# Keywords that others do not need.
DROPPABLE = KEPT - {"type", "properties", "patternProperties", "prefixItems"}
# Says why a schema is refused; empty if it is accepted.
Refusal = Callable[[dict[str, Any]], str]


class Exhausted(Exception):
    """The budget is spent."""


class Budget:
    """The checks that a request may cost."""

    def __init__(self, checks: int = MAX_CHECKS, seconds: float = BUDGET_SECONDS) -> None:
        self._checks, self._end = checks, time.process_time() + seconds

    def spend(self) -> None:
        """Counts one check. Raises Exhausted."""
        self._checks -= 1
        if self._checks < 0 or time.process_time() > self._end:
            raise Exhausted


def relax(normal: Normal, refusal: Refusal, budget: Budget, whole: Callable[[], str] | None = None) -> None:
    """Relaxes the schema in place until neither `refusal` nor `whole` refuses it.

    `whole` checks the schema where it is used; the default is `refusal`. Raises Exhausted if nothing has been checked.
    """
    whole = whole or (lambda: refusal(normal.standalone))
    budget.spend()
    reason = whole()
    if not reason:
        return
    relaxer = Relaxer(normal, refusal, budget)
    try:
        relaxer.relax()
        if reason := whole():
            relaxer = Relaxer(normal, lambda schema: refusal(schema) or whole(), budget)
            relaxer.relax_root()
            reason = whole()
    except Exhausted:
        relaxer.drop_everywhere()
        reason = whole()
    if reason:
        free(normal, reason)


def free(normal: Normal, reason: str) -> None:
    """Leaves nothing of the schema but its types."""
    types = types_of(normal.schema, normal.definitions)
    normal.schema = {} if types == ANY else {"type": sorted(types)}
    normal.definitions = {}
    normal.notes[:] = [Note((), WHOLE, reason)]


class Relaxer:
    """Relaxes the schemas of one root."""

    def __init__(self, normal: Normal, refusal: Refusal, budget: Budget) -> None:
        self._normal = normal
        self._refusal = refusal
        self._budget = budget
        self._definitions = normal.definitions

    def relax(self) -> None:
        """Relaxes all schemas, first without what they refer to, and then with it. Raises Exhausted."""
        normal = self._normal
        self._definitions = {name: {} for name in normal.definitions}
        for schema in (*normal.definitions.values(), normal.schema):
            self._relax(schema)
        self._definitions = normal.definitions
        for schema in (*reversed(normal.definitions.values()), normal.schema):
            self._relax(schema)

    def relax_root(self) -> None:
        """Drops keywords of the root only. Raises Exhausted."""
        if isinstance(self._normal.schema, dict):
            self._drop(self._normal.schema)

    def drop_everywhere(self) -> None:
        """Drops the keywords that had to be dropped somewhere from all schemas."""
        keywords = {note.keyword for note in self._normal.notes if note.reason} & DROPPABLE
        waiting = [self._normal.schema, *self._normal.definitions.values()]
        while waiting:
            schema = waiting.pop()
            waiting += children(schema)
            for keyword in sorted(keywords & schema.keys()) if isinstance(schema, dict) else ():
                self._note(schema, keyword, "")
                del schema[keyword]

    def _refused(self, schema: dict[str, Any]) -> str:
        self._budget.spend()
        return self._refusal(standalone(schema, self._definitions))

    def _relax(self, schema: Any) -> None:
        """Relaxes the schemas in a schema that is refused, and then itself if that does not suffice."""
        if isinstance(schema, dict) and self._refused(schema):
            for each in list(children(schema)):
                self._relax(each)
            if self._refused(schema):
                self._drop(schema)

    def _drop(self, schema: dict[str, Any]) -> None:
        """Drops keywords of a schema until it is accepted. Where the budget ends, the schema stays as it was."""
        given = dict(schema)
        try:
            self._keep_accepted(schema, given)
        except Exhausted:
            self._put(schema, given, given)
            raise

    def _keep_accepted(self, schema: dict[str, Any], given: dict[str, Any]) -> None:
        """Replaces the content of a schema, which is `given`, by what of it is accepted."""
        types = types_of(schema, self._definitions)
        kept: dict[str, Any] = {}
        for keyword in sorted(given, key=lambda each: ORDER.index(each) if each in ORDER else len(ORDER)):
            if any(other in given and other not in kept for other in NEEDS.get(keyword, ())):
                self._note(schema, keyword, "")
                continue
            self._put(schema, given, kept | {keyword: given[keyword]})
            reason = self._refused(schema)
            value = given[keyword] if not reason else self._part(schema, given, kept, keyword)
            if reason:
                self._note(schema, keyword, reason)
            if value is not None:
                kept |= value if reason else {keyword: value}
        self._put(schema, given, kept)
        if "type" not in kept and types != ANY:
            schema["type"] = sorted(types)
            if self._refused(schema):
                del schema["type"]

    def _put(self, schema: dict[str, Any], given: dict[str, Any], kept: dict[str, Any]) -> None:
        """Makes `kept` the content of the schema, in the order that was given."""
        schema.clear()
        schema.update({keyword: kept[keyword] for keyword in (*given, *kept) if keyword in kept})

    def _part(self, schema: dict[str, Any], given: dict[str, Any], kept: dict[str, Any], keyword: str) -> dict[str, Any] | None:
        """Keywords that enforce a part of one that is refused; None if there are none."""
        if keyword == "properties":
            return self._some_properties(schema, given, kept)
        if keyword not in ("allOf", "oneOf"):
            return None
        before = accepted = kept.get("allOf", [])
        for each in given["allOf"] if keyword == "allOf" else [{"anyOf": given["oneOf"]}]:
            self._put(schema, given, kept | {"allOf": [*accepted, each]})
            accepted = accepted if self._refused(schema) else schema["allOf"]
        return None if accepted is before else {"allOf": accepted}

    def _some_properties(self, schema: dict[str, Any], given: dict[str, Any], kept: dict[str, Any]) -> dict[str, Any] | None:
        """The properties, of which those that are refused may have any value."""
        properties: dict[str, Any] = dict.fromkeys(given["properties"], True)
        for name, value in [("", True), *given["properties"].items()]:
            trial = properties | {name: value} if name in properties else properties
            self._put(schema, given, kept | {"properties": trial})
            if not self._refused(schema):
                properties = trial
            elif trial is properties:
                return None
        return {"properties": properties}

    def _note(self, schema: dict[str, Any], keyword: str, reason: str) -> None:
        self._normal.notes.append(Note(self._normal.paths.get(id(schema), ()), keyword, reason))
