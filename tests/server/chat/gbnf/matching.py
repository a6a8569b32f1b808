"""How the tests read a grammar: with llguidance as the server does, and with a matcher of their own."""

from __future__ import annotations

import json
from collections.abc import Mapping

from llguidance import LLMatcher, LLTokenizer

from outrider.server.chat.grammar_builder import build
from outrider.server.chat.grammar_job import GrammarJob, Structure
from outrider.verify.constraints.limits import LIMITS

BYTES = LLTokenizer("byte")
# A grammar as a tree: ("text", "ab"), ("class", "abc"), ("not", "abc"), ("any",), ("rule", "name"), ("series", [...]),
# ("choice", [...]) or ("times", node, low, high), where high may be None.
Tree = tuple[object, ...]


class Follower:
    """A grammar that llguidance follows."""

    def __init__(self, grammar: str, special: Mapping[str, int] | None = None) -> None:
        """Raises ValueError if there is no such grammar."""
        job = GrammarJob(64, 256, structure=Structure("grammar", grammar), special=special or {})
        self.lark = build(job, lambda grammar: "").text
        self._matcher = LLMatcher(BYTES, self.lark, log_level=0, limits=LIMITS)
        if self._matcher.is_error():
            raise ValueError(self._matcher.get_error())

    def allows(self, text: str, complete: bool = True) -> bool:
        """Whether it allows the text, as the whole answer or as its beginning."""
        matcher = self._matcher.deep_copy()
        return all(matcher.consume_token(byte) for byte in text.encode()) and (matcher.is_accepting() or not complete)


def written(tree: Tree) -> str:
    """A tree as GBNF."""
    kind, *rest = tree
    match kind, rest:
        case "text", [str(text)]:
            return json.dumps(text, ensure_ascii=False)
        case "class" | "not", [str(characters)]:
            return f"[{'^' if kind == 'not' else ''}{characters}]"
        case "any", _:
            return "."
        case "rule", [str(name)]:
            return name
        case "series" | "choice", [list(children)]:
            return "(" + (" | " if kind == "choice" else " ").join(map(written, children)) + ")"
        case "times", [tuple(child), low, high]:
            numbers = f"{{{low},{'' if high is None else high}}}"
            return written(child) + {"{0,}": "*", "{1,}": "+", "{0,1}": "?"}.get(numbers, numbers)
    raise AssertionError(tree)


class Matcher:
    """Matches texts against a grammar by trying all ways, without a parser, a lexer or bytes."""

    def __init__(self, rules: Mapping[str, Tree], text: str) -> None:
        self._rules, self._text = rules, text
        self._ends: dict[tuple[str, int], frozenset[int]] = {}  # where a rule that begins at a place may end

    def matches(self) -> bool:
        """Whether the rule `root` matches the whole text."""
        while True:  # recursive rules: until no rule has more ends
            before = dict(self._ends)
            for name in self._rules:
                for start in range(len(self._text) + 1):
                    self._ends[name, start] = self._match(self._rules[name], start)
            if before == self._ends:
                return len(self._text) in self._ends["root", 0]

    def _match(self, tree: Tree, start: int) -> frozenset[int]:
        kind, *rest = tree
        text = self._text
        match kind, rest:
            case "text", [str(wanted)]:
                return frozenset([start + len(wanted)] if text.startswith(wanted, start) else [])
            case "class" | "not", [str(characters)]:
                is_member = start < len(text) and (text[start] in characters) == (kind == "class")
                return frozenset([start + 1] if is_member else [])
            case "any", _:
                return frozenset([start + 1] if start < len(text) else [])
            case "rule", [str(name)]:
                return self._ends.get((name, start), frozenset())
            case "series", [list(children)]:
                ends = frozenset([start])
                for child in children:
                    ends = self._next(child, ends)
                return ends
            case "choice", [list(children)]:
                return frozenset(end for child in children for end in self._match(child, start))
            case "times", [tuple(child), int(low), high]:
                return self._times(child, start, low, high)
        raise AssertionError(tree)

    def _times(self, child: Tree, start: int, low: int, high: object) -> frozenset[int]:
        ends = frozenset([start])
        found = ends if low == 0 else frozenset[int]()
        limit = high if isinstance(high, int) else low + len(self._text) + 1
        for count in range(1, limit + 1):
            ends = self._next(child, ends)
            if count >= low:
                found |= ends
        return found

    def _next(self, child: Tree, starts: frozenset[int]) -> frozenset[int]:
        return frozenset(end for start in starts for end in self._match(child, start))
