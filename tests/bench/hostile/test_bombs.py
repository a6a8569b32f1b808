"""Every named attack is a request that a client can send, and fits the body limit."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest

from bench.hostile.bombs import ELEMENTS, elements, entries, everywhere, filled, filled_bombs, long_text, named_bombs
from bench.hostile.encoding import encode
from bench.hostile.endpoints import HOLE, Endpoint, Place
from bench.hostile.structures import GRAMMARS, REGEXES, chain, deep, schemas
from bench.hostile.target import Target
from outrider.server.settings import Limits
from tests.bench.hostile.targets import endpoints, target

FILLED = {"list", "longest list", "mapping", "text"}
KINDS = {"grammar", "regex", "schema", "tool grammar", "float", "number", "stop ids"}
KINDS |= {"special tokens", "special tokens, hang up", "choices", "prompts", "echo", "session", "store", "nesting"}
KINDS |= {"masks", "large body"}


def test_all_kinds_of_attack_are_there() -> None:
    counts = Counter(bomb.kind for bomb in named_bombs())
    assert set(counts) == KINDS
    assert counts["float"] >= 3 * 4 * 2
    assert counts["tool grammar"] == 2 * len(GRAMMARS + REGEXES)


def test_every_endpoint_gets_every_kind_of_long_value() -> None:
    bombs = filled_bombs(endpoints())
    assert {bomb.kind for bomb in bombs} == FILLED
    taking_bodies = {endpoint.path for endpoint in endpoints() if endpoint.valid is not None}
    for path in taking_bodies:
        assert {"list", "longest list", "text"} <= {bomb.kind for bomb in bombs if bomb.path == path}


def test_bodies_are_bytes_of_the_expected_size() -> None:
    aim = target(body_bytes=200_000)
    for bomb in (*named_bombs(), *filled_bombs(endpoints())):
        body = bomb.body(aim)
        assert body.startswith(b"{") and body.endswith(b"}")
        assert len(body) <= aim.body_bytes, bomb.kind


def test_every_list_mapping_and_text_is_filled() -> None:
    body = {"model": "m", "f": HOLE}
    kinds = (("array", None), ("object", True), ("object", False), ("string", None), ("integer", None))
    places = tuple(Place(body, kind, {"x": 1}, 5, bool(mapping)) for kind, mapping in kinds)
    bombs = list(everywhere(Endpoint("POST", "/x", {}, places)))
    bodies = [bomb.body(target(body_bytes=1000)) for bomb in bombs]
    assert [bomb.kind for bomb in bombs] == ["list"] * (1 + len(ELEMENTS)) + ["longest list", "mapping", "list", "text"]
    assert [len(body) > 980 for body in bodies] == [bomb.kind != "longest list" for bomb in bombs]
    assert json.loads(bodies[1 + len(ELEMENTS)])["f"] == [{"x": 1}] * 5


@pytest.mark.parametrize("value", [partial(elements, 0), partial(elements, {"a": "b"}), entries, long_text])
def test_values_are_as_long_as_a_body_may_be(value: Callable[[Target, int], bytes]) -> None:
    body = filled(Place({"f": HOLE}, "any"), value, target(body_bytes=1000))
    assert 980 < len(body) <= 1000
    assert len(json.loads(body)["f"]) > 50


def test_structures_pass_the_limit_on_their_size() -> None:
    for structure in (*GRAMMARS, *REGEXES, *schemas()):
        size = len(structure if structure in (*GRAMMARS, *REGEXES) else encode(structure))
        assert size < Limits().grammar_bytes, encode(structure)[:100]
    assert 'a2899: a2900\na2900: "x"' in chain("a")
    assert json.loads(deep(3).removeprefix("RAW"))["properties"]["a"]["properties"]["a"]["properties"] == {"a": {}}
    assert len(list(schemas())) >= 10
