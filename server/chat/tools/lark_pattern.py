"""Converts a Lark grammar without recursion to one regular expression.

Tool calls carry a custom tool's input inside a JSON string, which a grammar can enforce only by a regular expression.
"""

import re
from collections.abc import Callable

from outrider.server.http import json_body

# This bounds the length of a grammar, and of its regular expression.
MAX_CHARACTERS = 1 << 16
# This bounds the regular expressions of all rules together.
MAX_EXPANDED_CHARACTERS = 1 << 20
# Quantifiers are possessive: a text that does not match is read once.
TOKEN = re.compile(
    r"""(?P<space>[ \t\f]++|//[^\n]*+)
    |(?P<newline>(?:\r?\n[ \t]*+)++)
    |(?P<string>"(?:[^"\\\n]|\\.)*+"i?)
    |(?P<regex>/(?!/)(?:[^/\\\n]|\\.)++/[imslux]*+)
    |(?P<name>[?!]?[A-Za-z_][A-Za-z0-9_]*+)
    |(?P<priority>\.-?\d++)
    |(?P<repeat>~\s*+\d++(?:\s*+\.\.\s*+\d++)?|\{\s*+\d++\s*+(?:,\s*+(?:\d++\s*+)?)?\})
    |(?P<import>%import\b)
    |(?P<other>->|\.\.|[:|()\[\]*+?,.])""",
    re.VERBOSE,
)
# These are the terminals of Lark's library, without lookarounds.
COMMON = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[a-fA-F0-9]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"(?:[0-9]+\.[0-9]*|\.[0-9]+)",
    "FLOAT": r"(?:[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)",
    "NUMBER": r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "SIGNED_NUMBER": r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\.)*"',
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[_A-Za-z][_A-Za-z0-9]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
}
# A token is its kind and its text.
Token = tuple[str, str]


def lark_pattern(grammar: str) -> str:
    """The regular expression of the texts of `grammar`. Raises ValueError if it is invalid, recursive or too large."""
    try:
        return Grammar(grammar).pattern("start")
    except RecursionError:
        raise ValueError("it is nested too deep; flatten it") from None


class Grammar:
    """The rules of a grammar, each expanded once."""

    def __init__(self, text: str) -> None:
        """Raises ValueError if `text` is not a list of rules and imports."""
        self._rules: dict[str, list[Token]] = {}
        self._patterns: dict[str, str | None] = {}  # patterns by rule; None while it is being expanded
        self._characters = 0  # characters of all patterns
        rule: list[Token] = []
        for line in split_lines(tokenize(text)):
            if line[0][0] == "import":
                names = [text for kind, text in line[1:] if kind == "name"]
                if names[:1] != ["common"] or not set(names[1:]) <= set(COMMON):
                    raise ValueError("only the terminals of 'common' can be imported, without new names")
                self._patterns |= {name: COMMON[name] for name in names[1:]}
            elif line[0][1] == "|":
                rule += line
            elif line[0][0] == "name":
                tokens = [token for token in line[1:3] if token[0] != "priority"] + line[3:]
                if not tokens or tokens[0][1] != ":":
                    raise ValueError(f"{line[0][1]!r} is not followed by ':'")
                rule = tokens[1:]
                self._rules[line[0][1].lstrip("?!")] = rule
            else:
                raise ValueError(f"a rule cannot begin with {line[0][1][:20]!r}")

    def pattern(self, name: str) -> str:
        """The regular expression of a rule. Raises ValueError."""
        if name not in self._patterns:
            if name not in self._rules:
                raise ValueError(f"there is no rule {name!r}")
            self._patterns[name] = None
            self._patterns[name] = expanded = Expression(self._rules[name], self.pattern).parse()
            self._characters += len(expanded)
            if self._characters > MAX_EXPANDED_CHARACTERS:
                raise ValueError("its rules repeat each other too often; shorten it")
        pattern = self._patterns[name]
        if pattern is None:
            raise ValueError(f"its rule {name!r} is recursive")
        return pattern


class Expression:
    """Parses the right side of a rule."""

    def __init__(self, tokens: list[Token], rule: Callable[[str], str]) -> None:
        """`rule` returns the regular expression of another rule."""
        self._tokens = [*tokens, ("end", "")]
        self._rule = rule
        self._at = 0

    def parse(self) -> str:
        """The regular expression. Raises ValueError."""
        pattern = self._alternatives()
        if self._peek()[0] != "end":
            raise ValueError(f"{self._peek()[1][:20]!r} is not supported")
        return pattern

    def _alternatives(self) -> str:
        options = [self._sequence()]
        while self._peek()[1] == "|":
            self._at += 1
            options.append(self._sequence())
        return bounded(options[0] if len(options) == 1 else f"(?:{'|'.join(options)})")

    def _sequence(self) -> str:
        parts = []
        while self._peek()[0] in ("string", "regex", "name") or self._peek()[1] in ("(", "["):
            parts.append(self._repeated(self._atom()))
        if self._peek()[1] == "->":
            self._at += 2  # an alias names a branch of the tree
        return bounded("".join(parts))

    def _atom(self) -> str:
        kind, text = self._next()
        if kind == "regex":
            body, _, flags = text[1:].rpartition("/")
            used = "".join(sorted(set(flags) - set("lu")))
            return f"(?{used}:{body})".replace(r"\/", "/")
        if kind == "name":
            return self._rule(text)
        if kind == "string":
            return self._range(text) if self._peek()[1] == ".." else literal(text)
        inner, closing = self._alternatives(), self._next()[1]
        if closing != {"(": ")", "[": "]"}[text]:
            raise ValueError(f"{text!r} is not closed")
        return f"(?:{inner})?" if text == "[" else inner

    def _range(self, first: str) -> str:
        self._at += 1
        ends = [unquote(first), unquote(self._next()[1])]
        if [len(end) for end in ends] != [1, 1]:
            raise ValueError("the ends of a range must be one character each")
        return f"[{escape(ends[0])}-{escape(ends[1])}]"

    def _repeated(self, pattern: str) -> str:
        kind, text = self._peek()
        if kind == "repeat":
            self._at += 1
            counts = re.findall(r"\d+", text)
            open_ended = "," in text and len(counts) == 1
            return f"(?:{pattern}){{{counts[0]}{',' if open_ended else ''}{',' + counts[1] if len(counts) > 1 else ''}}}"
        if text in ("*", "+", "?"):
            self._at += 1
            return f"(?:{pattern}){text}"
        return pattern

    def _peek(self) -> Token:
        return self._tokens[min(self._at, len(self._tokens) - 1)]

    def _next(self) -> Token:
        token = self._peek()
        self._at += 1
        return token


def tokenize(text: str) -> list[Token]:
    """The tokens of a grammar, without spaces and comments. Raises ValueError."""
    tokens: list[Token] = []
    at = 0
    while at < len(text):
        found = TOKEN.match(text, at)
        if found is None:
            raise ValueError(f"{text[at : at + 20]!r} is not supported")
        at = found.end()
        if found.lastgroup != "space":
            tokens.append((str(found.lastgroup), found[0]))
    return tokens


def split_lines(tokens: list[Token]) -> list[list[Token]]:
    """The tokens of each line; a line may continue inside of brackets."""
    lines: list[list[Token]] = [[]]
    depth = 0
    for token in tokens:
        depth += (token[1] in ("(", "[")) - (token[1] in (")", "]"))
        if token[0] != "newline":
            lines[-1].append(token)
        elif depth <= 0:
            lines.append([])
    return [line for line in lines if line]


def unquote(token: str) -> str:
    """The text of a string. Raises ValueError."""
    if not token.startswith('"'):
        raise ValueError(f"{token[:20]!r} is not a string")
    return str(json_body.decode(token.removesuffix("i")))


def literal(token: str) -> str:
    """The regular expression of a string. Raises ValueError."""
    pattern = escape(unquote(token))
    return f"(?i:{pattern})" if token.endswith("i") else f"(?:{pattern})" if len(pattern) != 1 else pattern


def escape(text: str) -> str:
    """The regular expression of a text, in the syntax that Python and Rust share."""
    return re.sub(r"[\\.+*?()|\[\]{}^$&~#-]", r"\\\g<0>", text)


def bounded(pattern: str) -> str:
    """The pattern. Raises ValueError if it is too long."""
    if len(pattern) > MAX_CHARACTERS:
        raise ValueError(f"its regular expression has more than {MAX_CHARACTERS} characters; shorten it")
    return pattern
