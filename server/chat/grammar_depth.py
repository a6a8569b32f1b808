"""Depths of structures before they reach a recursive compiler: nested JSON, and Lark rules that refer to each other.

Never recurses, and takes time linear in the size of the input.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

# Strings, comments and regexes match first, so that the names inside them are skipped. An unclosed one ends with its line, so
# that it is read once. A name that starts a line and is followed by a colon, perhaps after attributes, is defined there.
LARK = re.compile(
    r"""
      "(?:\\.|[^"\\\n])*+"?
    | //[^\n]*
    | /(?:\\.|[^/\\\n])*+/?
    | ^[ \t]*[?!]?(?P<defined>[A-Za-z_]\w*)(?:\[[^\]\n]*\])?(?:\.-?\d+)?[ \t]*:
    | (?P<used>[A-Za-z_]\w*)
    """,
    re.VERBOSE | re.MULTILINE,
)


def json_depth(value: Any) -> int:
    """Nesting depth of lists and objects."""
    level, levels = [value], 0
    while level:
        level = [
            inner
            for each in level
            if isinstance(each, (dict, list))
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
        levels += 1
    return levels


def rule_depth(grammar: str) -> int:
    """How many rules and terminals of a Lark grammar a compiler has open at once; 0 if the grammar contains other grammars.

    A compiler starts at `start` and compiles a rule where it is first used. The rules that no other rule uses do not count.
    """
    rules = {} if "%lark" in grammar else lark_rules(grammar)
    deepest, seen = 0, {"start"}
    open_rules = [iter(rules.get("start", ()))]
    while open_rules:
        deepest = max(deepest, len(open_rules))
        name = next((name for name in open_rules[-1] if name in rules and name not in seen), None)
        if name is None:
            open_rules.pop()
        else:
            seen.add(name)
            open_rules.append(iter(rules[name]))
    return deepest if rules else 0


def lark_rules(grammar: str) -> Mapping[str, Sequence[str]]:
    """The names that each rule and terminal of a Lark grammar uses, in order."""
    rules: dict[str, list[str]] = {}
    uses: list[str] = []
    for match in LARK.finditer(grammar):
        if match["defined"]:
            uses = rules[match["defined"]] = []
        elif match["used"]:
            uses.append(match["used"])
    return rules
