"""Depths are exact, do not depend on the stack, and take linear time."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.server.chat.grammar_depth import json_depth, lark_rules, rule_depth
from tests.grammars import nested_grammars, recursive_rules, rule_chain, terminal_chain


def test_the_depth_of_json_is_not_limited_by_the_stack() -> None:
    nested: Any = 1
    for _ in range(100_000):
        nested = [nested]
    assert json_depth(nested) == 100_001
    assert json_depth({"a": [1, {"b": 2}]}) == 4


@pytest.mark.parametrize("chain", [rule_chain, terminal_chain, recursive_rules])
@pytest.mark.parametrize("size", [1, 20, 5000])
def test_the_depth_of_rules_counts_references_from_start(chain: Any, size: int) -> None:
    assert rule_depth(chain(size)) == size + 2


@pytest.mark.parametrize(
    ("grammar", "depth"),
    [
        ('start: "b: c"\nb: c\nc: d\nd: "x"', 1),
        ('start: /b c/ // b\nb: c\nc: "x"', 1),
        ('?start: b | c\n!b.-2: "x"\nc[capture="d", max_tokens=3]: D\n  | b\nD: "y"', 3),
        ("start: start b\nb: start b", 2),
        ('start: "unclosed b\n  | c\nc: "x"\nb: c', 2),
        ('{"grammars": [{"json_schema": {}}]}', 0),
        (nested_grammars(5000), 0),
    ],
)
def test_text_is_not_taken_for_rules(grammar: str, depth: int) -> None:
    assert rule_depth(grammar) == depth


@pytest.mark.parametrize("part", ['"', "/", "/\\", "\\", "a[", "\na[", "\na    ", "\n!", " \t", "\na.1", "a: ", "\na:a"])
def test_unclosed_text_is_read_once(part: str) -> None:
    """Quadratic time would exceed the test's time limit."""
    assert lark_rules(part * (400_000 // len(part))).keys() == lark_rules(part * 4).keys()
