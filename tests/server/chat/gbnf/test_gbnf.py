"""GBNF is accepted and followed as llama.cpp reads it, whatever it consists of."""

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from outrider.server.chat.gbnf import is_gbnf, to_lark
from outrider.server.chat.grammar_builder import build
from outrider.server.chat.grammar_job import GrammarJob, Structure
from outrider.verify.constraints.limits import LIMITS
from tests.slow import mostly_slow

BYTES = LLTokenizer("byte")
WS = "ws ::= [ \\t\\n]*\n"
JSON = (
    'root ::= value\nvalue ::= map | list | text | number | "true" ws\n'
    'map ::= "{" ws (text ":" ws value ("," ws text ":" ws value)*)? "}" ws\n'
    'list ::= "[" ws (value ("," ws value)*)? "]" ws\n'
    'text ::= "\\"" ([^"\\\\] | "\\\\" ["\\\\nt])* "\\"" ws\nnumber ::= "-"? [0-9]+ ws\n' + WS
)
# A grammar, texts that it matches, and texts that it does not match.
GRAMMARS = {
    "text": ('root ::= "ab" "c"', ["abc"], ["ab", "abcc", ""]),
    "alternatives": ('root ::= "a" | "b" "c"', ["a", "bc"], ["b", "ac", ""]),
    "class": ("root ::= [a-cx] [0-9]", ["a1", "x9"], ["d1", "a", "-1"]),
    "any character": ('root ::= . "b" .', ["abc", "😀b\n", "bbb"], ["ab", "b"]),
    "group in a group": ('root ::= (("a" ("b" | "c"))* "d")', ["d", "abacd"], ["ad"]),
    "star": ('root ::= "ab"*', ["", "abab"], ["aba"]),
    "plus": ("root ::= [ab]+", ["a", "ba"], ["", "c"]),
    "option": ('root ::= "a"? "b"', ["b", "ab"], ["aab"]),
    "number": ('root ::= "ab"{2} [c]{ 3 }', ["ababccc"], ["abccc", "ababcc"]),
    "at least": ('root ::= "a"{2,}', ["aa", "aaaa"], ["a"]),
    "between": ('root ::= ("a" | "b"){1,2}', ["a", "ab"], ["", "aba"]),
    "never": ('root ::= "a"{0} "b"{0,0} "c"', ["c"], ["ac", "bc"]),
    "recursion": ('root ::= "(" root ")" | "x"', ["x", "((x))"], ["(x", "()"]),
    "left recursion": ('root ::= root "a" | "b"', ["b", "baa"], ["ab", "a"]),
    "after a bar": ('root ::= "a" |\n\n # next\n "b" |\n"c"', ["a", "b", "c"], ["ab"]),
    "empty alternative": ('root ::= "x" y "x"\ny ::= | "a"', ["xx", "xax"], ["x", "xaax"]),
    "empty group": ('root ::= "a" (|"b") ()', ["a", "ab"], ["b"]),
    "empty text": ('root ::= "" "a" ""*', ["a"], ["", "aa"]),
    "dash at an edge": ("root ::= [-a] [b-]", ["-b", "a-"], ["b-", "--b"]),
    "range of a dash": ("root ::= [+--]", ["+", ",", "-"], ["."]),
    "negated class": ('root ::= [^a-c\\n]+ "\\n"', ["xyz\n", "é😀\n"], ["a\n", "x", "\n"]),
    "empty class": ('root ::= [] "a" [^]', ["a"], [""]),
    "slashes": ('root ::= [/] "/" [^/]', ["//a"], ["///"]),
    "escapes in a text": (r'root ::= "\n\t\r\\\"\[\]\-\x41\u00e9\U0001F600"', ['\n\t\r\\"[]-Aé😀'], ["n"]),
    "escapes in a class": (r"root ::= [\]\[\\\-\x30-\x32\u4e00-\u4e02\U0001F600]+", ["]0-\\", "一丂😀"], ["3", "x"]),
    "control characters": (r'root ::= "\x01\x7f\u0085\u2028" [\x00-\x1f]', ["\x01\x7f\x85\u2028\x00"], ["\x01"]),
    "raw line break": ('root ::= "a\nb"', ["a\nb"], ["a b"]),
    "surrogates": (r"root ::= [\uD7FF-\uE000]", ["\ud7ff", "\ue000"], ["\ue001"]),
    "lines in a group": ('root ::= (\n  "a" # one\n\n  | "b"\r\n)+\n', ["ab", "b"], [""]),
    "many": ('root ::= "a"{0,300} "b"', ["a" * 300 + "b"], ["a" * 301 + "b"]),
    "repeated repetition": ("root ::= ( [x]* )* [y]{2}{2}", ["yyyy", "xxyyyy"], ["yy", "yyyyyy"]),
    "names": ('root ::= a-b c_d A9\na-b ::= "1"\nc_d ::= "2"\nA9 ::= "3"', ["123"], ["12"]),
    "one name in two ways": ('root ::= a-b a_b\na-b ::= "1"\na_b ::= "2"', ["12"], ["11", "22"]),
    "names of Lark": ('root ::= start ignore\nstart ::= "s"\nignore ::= "i"', ["si"], ["s"]),
    "defined twice": ('root ::= a\na ::= "1"\na ::= "2"', ["2"], ["1"]),
    "recursion at both ends": ('root ::= root "+" root | [0-9]', ["1", "1+2+3"], ["1+", "+"]),
    "optional recursion": ('root ::= item ("," root)? | "."\nitem ::= [a-z]+', ["a", "a,bc", "a,."], ["a,", ".,a"]),
    "mutual recursion": ('root ::= "a" b | "."\nb ::= "b" root | ","', ["abab.", "a,"], ["ab", "b."]),
    "itself": ('root ::= root | a\na ::= root | "x"', ["x"], ["", "xx"]),
    "two lists": (
        'root ::= items ";" items\nitems ::= "x" | items "," "x" | items ":" items',
        ["x;x,x", "x:x,x;x"],
        ["x", ";"],
    ),
    "json": (JSON, ['{"a" : [1, -22, "x\\"y"], "b": {} } ', "true", '[ "é😀" ]'], ['{"a"}', "[1,]", '"a', "{,}"]),
    # What one lexeme may begin, another one may end.
    "prefix of a text": ('root ::= "(" root ")" | "ab" | [a-z] "bc"', ["ab", "abc", "(abc)"], ["a", "abcc"]),
    "word and its letter": ('root ::= "(" root ")" | [a-z]+ "x"', ["ax", "xxx", "(ax)"], ["x", "xa"]),
    "list and its item": ('root ::= [ab]* "b" | "<" root ">"', ["b", "abab", "<bb>"], ["a", ""]),
    "space twice": ('root ::= "(" ws root ws ")" ws " " | "x"\n' + WS, ["( x )  ", "(x) "], ["(x)"]),
    "key and any key": (
        'root ::= "{" ("k" ws ":" [0-9] | [a-z]+ " "* ":" root) "}"\n' + WS,
        ["{k:1}", "{k :1}", "{k :{k:2}}", "{kk:{k:1}}"],
        ["{kk:1}", "{k:}"],
    ),
    "same first byte": ('root ::= "(" root ")" | "é" [è] | [é] "a"', ["éè", "éa", "(éa)"], ["é"]),
    "text between elements": (
        'root ::= elem\nelem ::= "<b>" part* "</b>"\npart ::= text | elem\ntext ::= [^<]+',
        ["<b>x</b>", "<b>x<b></b>yz</b>"],
        ["<b>", "<b><</b>"],
    ),
}
INVALID = {
    'root ::= "a': "rule 'root', line 1, column 10: this text is never closed",
    'root ::= "\\': "rule 'root', line 1, column 11: there is no escape '\\\\' of this form",
    'root ::= "\\UFFFFFFFF"': "Unicode has no such character",
    'root ::= "\\uD800"': "UTF-8 has no such character",
    "root ::= [a": "this class is never closed",
    "root ::= [z-a]": "line 1, column 11: the range's second character comes before its first",
    "root ::= [^\\x00-\\U0010FFFF]": "no character is in this class",
    'root ::= ("a"\nb ::= "c"': "line 1, column 10: this parenthesis is never closed",
    'root ::= "a")': "line 1, column 13: this parenthesis was never opened",
    'root ::= ("a" | *)': "line 1, column 17: there is nothing to repeat",
    'root ::= "a"{,2}': "line 1, column 13: this is no part of a rule",
    'root ::= "a"\nb ::= "c" ,': "rule 'b', line 2, column 11: this is no part of a rule",
    'root ::= "a" b\nb ::= c "x"': "rule 'b', line 2, column 7: there is no rule named 'c'",
    'other ::= "a"': "no rule named 'root'",
    "root ::= <think>": "<think> is no special token of the model",
    "root ::= " + '("a"' * 5000 + ")" * 5000: "nested too deep",
    "root ::= " + "(" * 5000: "never closed",
}
LARK = [
    'start: "a ::= b"',
    '# root ::= x\n\n?start: "a"',
    '%llguidance {}\nstart: "root" "::="',
    'start: a\na: "x"\n  | "root\\n::= y"\n',
    "start[capture]: <[10]>\n",
]


class Follower:
    def __init__(self, grammar: str, special: Mapping[str, int] | None = None) -> None:
        """Raises ValueError if there is no such grammar."""
        job = GrammarJob(structure=Structure("grammar", grammar), special=special or {})
        self.lark = build(job, lambda grammar: "").grammar
        self._matcher = LLMatcher(BYTES, self.lark, log_level=0, limits=LIMITS)
        if self._matcher.is_error():
            raise ValueError(self._matcher.get_error())

    def allows(self, text: str) -> bool:
        matcher = self._matcher.deep_copy()
        return all(matcher.consume_token(byte) for byte in text.encode()) and matcher.is_accepting()


@pytest.mark.parametrize(("grammar", "matching", "others"), GRAMMARS.values(), ids=GRAMMARS)
def test_every_kind_of_grammar_is_followed(grammar: str, matching: list[str], others: list[str]) -> None:
    known = Follower(grammar)
    assert [text for text in matching if not known.allows(text)] == []
    assert [text for text in others if known.allows(text)] == []


@pytest.mark.parametrize(("grammar", "reason"), INVALID.items())
def test_an_error_names_the_rule_and_the_place(grammar: str, reason: str) -> None:
    with pytest.raises(ValueError) as raised:
        to_lark(grammar, {})
    assert reason in str(raised.value) and "\n" not in str(raised.value)


def test_tokens_are_matched_by_id() -> None:
    special = {"<open>": 1, "<close>": 2}
    known = Follower("root ::= <open> (!<close>)* <[2]> [a-z]+", special)
    assert known.allows("\1hello\2abc") and known.allows("\1\2a")
    assert not known.allows("hello\2abc") and not known.allows("\1\2\2a") and not known.allows("\1hello")


def test_ordinary_tokens_can_be_taken_back() -> None:
    matcher = LLMatcher(BYTES, Follower('root ::= "<" <[97]> "x"').lark, log_level=0, limits=LIMITS)
    for token in b"<ax":
        assert matcher.compute_ff_tokens() == []  # a forced one could not be
        assert matcher.consume_token(token) and matcher.rollback(1) and matcher.consume_token(token)
    assert matcher.is_accepting()


@pytest.mark.parametrize("grammar", LARK)
def test_lark_is_not_taken_for_gbnf(grammar: str) -> None:
    assert not is_gbnf(grammar) and to_lark(grammar, {}) == grammar


@given(st.lists(st.sampled_from(["\n", " ", "\t", "# a: b\n", "\r\n"])), st.from_regex(r"\A[A-Za-z][\w-]*\Z"))
def test_a_grammar_is_what_its_first_rule_is(before: list[str], name: str) -> None:
    start = "".join(before)
    assert is_gbnf(f'{start}{name} ::= x: "a"\nstart: "b"')
    assert not is_gbnf(f'{start}{name}: "a"\nroot ::= "b"')


COSTLY = {
    "alternatives": "root ::= " + " | ".join(f'"k{number}" root "x"' for number in range(3000)),
    "sets of places": 'root ::= [ab]* root? "a"' + " [ab]" * 20 + ' "c" root',
    "empty rules": "root ::= "
    + " ".join(f"r{number}" for number in range(2000))
    + "".join(f'\nr{number} ::= | "a" r{number} "b"' for number in range(2000)),
    "repeated rules": "root ::= " + "(v)* " * 5000 + "\nv ::= root | " + '"a" root | ' * 2500 + '"b"',
}


@pytest.mark.parametrize("name", mostly_slow(COSTLY, "alternatives", "sets of places"))
def test_the_conversion_has_a_limit(name: str) -> None:
    with pytest.raises(ValueError, match="too many of its alternatives can begin with the same characters; simplify it"):
        to_lark(COSTLY[name], {})
