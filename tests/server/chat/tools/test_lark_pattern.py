"""Lark grammars as regular expressions."""

import re

import pytest

from outrider.server.chat.tools.lark_pattern import MAX_CHARACTERS, lark_pattern
from tests.server.chat.tools.patch_grammar import PATCH, PATCH_GRAMMAR


def test_the_grammar_of_a_patch() -> None:
    pattern = lark_pattern(PATCH_GRAMMAR)
    assert re.fullmatch(pattern, PATCH)
    for broken in (PATCH[1:], PATCH.replace("@@ ", "@"), PATCH + "x", "*** Begin Patch\n*** End Patch\n"):
        assert not re.fullmatch(pattern, broken)


@pytest.mark.parametrize(
    ("grammar", "matches", "others"),
    [
        ('start: "a.b" | "c"~2..3', ["a.b", "cc", "ccc"], ["axb", "c", "cccc"]),
        ('start: ["x"] (A "-")* A // words\n!A.2: "a".."c"+\n', ["a", "xb-c", "abc"], ["x", "d", "a-"]),
        ('start: "Yes"i /N[o0]/i "\\n" /a\\/b/', ["yESn0\na/b"], ["yes", "Yesno a/b"]),
        ('?start: one\n  | two\none: "1"{2}\ntwo: "2"{1,} "3"{1,2} \n', ["11", "2233"], ["1", "2", "3"]),
        ('start: (\n  "a"\n  "b"\n)\n', ["ab"], ["a"]),
        ('start: "[" /[^\\]]*/ "]"', ["[a]", "[]"], ["a"]),
    ],
)
def test_constructs(grammar: str, matches: list[str], others: list[str]) -> None:
    pattern = lark_pattern(grammar)
    assert all(re.fullmatch(pattern, text) for text in matches)
    assert not any(re.fullmatch(pattern, text) for text in others)


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ('start: "(" start ")" | "x"', "'start' is recursive"),
        ("start: missing", "no rule 'missing'"),
        ('start: "a"\n%ignore " "', "not supported"),
        ("start: X\n%import python.X", "only the terminals of 'common'"),
        ('start: "a" )', "is not supported"),
        ('start: %json {"type": "object"}', "not supported"),
        ('start: "ab".."c"', "one character each"),
        ("start: " + "(" * 5000, "nested too deep"),
    ],
)
def test_what_has_no_equal_is_named(grammar: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        lark_pattern(grammar)


def test_rules_that_double_do_not_fill_the_memory() -> None:
    doubling = "".join(f"r{number}: r{number + 1} r{number + 1}\n" for number in range(60))
    with pytest.raises(ValueError, match="has more than"):
        lark_pattern(f'start: r0\n{doubling}r60: "a"\n')
    copies = "".join(f"c{number}: long\n" for number in range(1000))
    all_copies = " | ".join(f"c{number}" for number in range(1000))
    with pytest.raises(ValueError, match="repeat each other too often"):
        lark_pattern(f'start: {all_copies}\n{copies}long: "{"x" * 30_000}"\n')
    assert len(lark_pattern("start: " + '"ab" ' * (MAX_CHARACTERS // 10))) <= MAX_CHARACTERS
