"""As few keywords as possible are dropped, and the work is bounded."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.server.chat.schemas.normal import normalised
from outrider.server.chat.schemas.relaxing import Budget, Exhausted, relax


def refusal(schema: Any) -> str:
    """Refuses what contains "bad", and objects with more than two properties."""
    if '"properties"' in str(schema).replace("'", '"') and len(schema.get("properties", ())) > 2:
        return "too large"
    return "bad" if "bad" in str(schema) else ""


def relaxed(schema: Any, **limits: Any) -> tuple[Any, list[str]]:
    normal = normalised(schema)
    relax(normal, refusal, Budget(**limits))
    return normal.standalone, [note.name for note in normal.notes]


def test_only_what_is_refused_is_dropped() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "bad", "minLength": 1}, "b": {"enum": [1]}}}
    schema_after = {"type": "object", "properties": {"a": {"type": "string", "minLength": 1}, "b": {"enum": [1]}}}
    assert relaxed(schema) == (schema_after, ["a.pattern"])
    assert relaxed(schema_after) == (schema_after, [])


def test_a_spent_budget_drops_the_same_keywords_everywhere_or_all() -> None:
    schema = {"type": "object", "properties": {name: {"type": "string", "pattern": "bad"} for name in "ab"}}
    after, names = relaxed(schema, checks=6)
    assert after == {"type": "object", "properties": {name: {"type": "string"} for name in "ab"}}
    assert set(names) == {"a.pattern", "b.pattern"}
    assert relaxed(schema, checks=2) == ({"type": ["object"]}, ["schema"])
    with pytest.raises(Exhausted):
        relaxed(schema, checks=0)
