"""Grammars, regular expressions and JSON schemas that are deep, long or ambiguous, each smaller than GRAMMAR_BYTES."""

import json
import re
from collections.abc import Iterator
from typing import Any

from tests.grammars import rule_chain, terminal_chain

# The characters of a token without end.
RUN = 30_000
# The rules of a chain, which is about 40 kB of grammar.
RULES = 2900
BRACKETS = 20_000
LEVELS = (60, 600, 1500)
DEFINITIONS = 1500
RAW = re.compile(r'"RAW((?:[^"\\]+|\\.)*)"')


def raw(text: str) -> str:
    """Text that `encode` writes as it is: values that the json module cannot write, such as very deep ones."""
    return "RAW" + text


def encode(body: Any) -> bytes:
    """Serializes like a careless client: with NaN, lone surrogates and lists of any depth."""
    text = RAW.sub(lambda match: str(json.loads(f'"{match[1]}"')), json.dumps(body))
    return text.encode("utf-8", "surrogatepass")


# Each mask takes longer than the one before.
AMBIGUOUS = "start: s\ns: s s | w\nw: /[a-z ]/"
GRAMMARS = (
    rule_chain(RULES),
    terminal_chain(RULES // 2),
    "start: " + "(" * BRACKETS + '"x"' + ")" * BRACKETS,
    "start: " + '("x" ' * 8000 + "start?" + ")" * 8000,
    'start: a a a a a a a a\na: a a | b b | b | ""\nb: a | "x"?',
    "start: " + " | ".join(f'"x{number}"' for number in range(5000)),
    "start: start",
    "start: /" + "(" * BRACKETS + "x" + ")" * BRACKETS + "/",
    'start: "x"{1000000}',
    'start: "x"{1' + " " * RUN + "!",
    'start: "x"{' + "1" * RUN + ",",
    'start: "' + '\\"' * (RUN // 2),
    "start: /" + "\\/" * (RUN // 2),
    "start: a" + " " * RUN + "\n" * RUN + "|",
    "start: " + "[" * (RUN // 2) + "'" * RUN,
    "// " + "*/ /*" * (RUN // 5) + "\nstart:",
    AMBIGUOUS,
)
REGEXES = (
    "(" * BRACKETS + "a" + ")" * BRACKETS,
    "(?:" * 12_000 + "a" + ")?" * 12_000,
    "((((a{1,99}){1,99}){1,99}){1,99}){1,99}",
    "(a?){5000}a{5000}",
    "(a+)+$",
    "|".join(f"a{number}b*" for number in range(5000)),
    "[" * BRACKETS,
    r"\p{L}{1,9999}x|(\p{N}|.){9999}",
    "(.*a){500}",
)


def schemas() -> Iterator[Any]:
    """Deep, cyclic, wide and impossible schemas."""
    for levels in LEVELS:
        yield deep(levels)
    yield raw("[" * BRACKETS + "]" * BRACKETS)
    links: dict[str, Any] = {f"d{number}": {"$ref": f"#/$defs/d{number + 1}"} for number in range(DEFINITIONS)}
    yield {"$ref": "#/$defs/d0", "$defs": links | {f"d{DEFINITIONS}": {"type": "integer"}}}
    yield {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
    forks = {f"d{number}": {"anyOf": [{"$ref": f"#/$defs/d{number + 1}"}] * 2} for number in range(60)}
    yield {"$ref": "#/$defs/d0", "$defs": forks | {"d60": {"type": "null"}}}
    yield {"enum": [f"value {number}" for number in range(4000)]}
    yield {"type": "array", "items": {"type": "array", "minItems": 10**9}, "minItems": 10**9}
    yield {"type": "string", "pattern": "(a?){5000}a{5000}", "maxLength": 10**9}
    yield {"type": "number", "multipleOf": 1e-300, "minimum": -1e308, "maximum": 5e-324}
    yield {"allOf": [{"type": "object", "properties": {f"p{number}": {}}} for number in range(1200)]}


def deep(levels: int) -> Any:
    """A schema of nested objects."""
    return raw('{"type":"object","properties":{"a":' * levels + "{}" + "}}" * levels)
