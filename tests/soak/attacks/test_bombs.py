"""Every named attack is a request that a client can send, and fits the body limit."""

from __future__ import annotations

import json
from collections import Counter

from outrider.server.settings import Limits
from tests.soak.attacks.bombs import named_bombs
from tests.soak.attacks.encoding import encode
from tests.soak.attacks.structures import GRAMMARS, REGEXES, chain, deep, schemas
from tests.soak.attacks.targets import target

KINDS = {"grammar", "regex", "schema", "tool grammar", "float", "number", "stop ids"}
KINDS |= {"special tokens", "special tokens, hang up", "choices", "prompts", "echo", "session", "store", "nesting"}
KINDS |= {"masks", "large body", "corpus"}


def test_all_kinds_of_attack_are_there() -> None:
    counts = Counter(bomb.kind for bomb in named_bombs())
    assert set(counts) == KINDS
    assert counts["float"] >= 3 * 4 * 2
    assert counts["tool grammar"] == 2 * len(GRAMMARS + REGEXES)


def test_bodies_are_bytes_of_the_expected_size() -> None:
    aim = target(body_bytes=200_000)
    for bomb in named_bombs():
        body = bomb.body(aim)
        assert body.startswith(b"{") and body.endswith(b"}")
        assert len(body) <= aim.body_bytes, bomb.kind


def test_structures_pass_the_limit_on_their_size() -> None:
    for structure in (*GRAMMARS, *REGEXES, *schemas()):
        size = len(structure if structure in (*GRAMMARS, *REGEXES) else encode(structure))
        assert size < Limits().grammar_bytes, encode(structure)[:100]
    assert 'a2899: a2900\na2900: "x"' in chain("a")
    assert json.loads(deep(3).removeprefix("RAW"))["properties"]["a"]["properties"]["a"]["properties"] == {"a": {}}
    assert len(list(schemas())) >= 10
