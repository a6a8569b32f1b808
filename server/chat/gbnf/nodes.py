"""The nodes of a grammar's rules, with links to their parents.

A node is structured if it needs the parser: it contains a recursive rule, a model's token, or an end of a lexeme. The other
nodes are regular: each is one regular expression.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

Ranges = list[tuple[int, int]]  # of code points, sorted; both ends belong to a range

LAST_CHARACTER = 0x10FFFF
# UTF-8 has no surrogates.
SURROGATES = (0xD800, 0xDFFF)
# llguidance puts this byte, which is in no UTF-8, before a special token.
TOKEN_MARK = 1 << 0xFF
# The nodes of a rule may be nested this deep, because recursive functions visit them.
MAX_DEPTH = 200


class Node:
    """A part of a rule."""

    parent: Node | None = None
    index = 0  # among the parent's children
    rule = ""  # the name of the rule whose body this is
    structured = False
    empty = False  # whether the empty text matches
    depth = 1

    def __init__(self, children: Sequence[Node] = ()) -> None:
        self.children: list[Node] = []
        self.adopt(children)

    def adopt(self, children: Iterable[Node]) -> None:
        self.children = list(children)
        for index, child in enumerate(self.children):
            child.parent, child.index = self, index
        self.depth = 1 + max((child.depth for child in self.children), default=0)


class Characters(Node):
    """One character of `ranges`."""

    def __init__(self, ranges: Ranges) -> None:
        super().__init__()
        self.ranges = ranges
        self.first_bytes = 0  # of the characters in UTF-8, as bits
        for low, high in ranges:
            self.first_bytes |= (2 << first_byte(high)) - (1 << first_byte(low))


class Token(Node):
    """One token of the model, as Lark writes it."""

    first_bytes = TOKEN_MARK

    def __init__(self, lark: str) -> None:
        super().__init__()
        self.lark = lark


class Reference(Node):
    """The rule `name`."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name


class Series(Node):
    """The children one after another. A lexeme ends before each index of `cuts`."""

    def __init__(self, children: Sequence[Node] = ()) -> None:
        super().__init__(children)
        self.cuts: set[int] = set()


class Choice(Node):
    """One of the children."""


class Repeat(Node):
    """The child `low` to `high` times; None = any number."""

    def __init__(self, child: Node, low: int, high: int | None) -> None:
        super().__init__([child])
        self.low, self.high = low, high


def series(children: Sequence[Node]) -> Node:
    """The children one after another, without a node for one alone."""
    return children[0] if len(children) == 1 else Series(children)


def choice(children: Sequence[Node]) -> Node:
    """One of the children, and of the children of choices among them, without a node for one alone."""
    flat = [inner for child in children for inner in (child.children if isinstance(child, Choice) else [child])]
    return flat[0] if len(flat) == 1 else Choice(flat)


def nodes_of(body: Node) -> Iterator[Node]:
    todo = [body]
    while todo:
        node = todo.pop()
        yield node
        todo.extend(node.children)


def first_byte(character: int) -> int:
    """The first byte of a code point in UTF-8."""
    if character < 0x80:
        return character
    if character < 0x800:
        return 0xC0 | character >> 6
    return 0xE0 | character >> 12 if character < 0x10000 else 0xF0 | character >> 18


def normal(ranges: Ranges, negated: bool) -> Ranges:
    """The ranges in order and without surrogates, or what they leave of Unicode."""
    excluded = [*ranges, SURROGATES] if negated else [*complement(ranges), SURROGATES]
    return complement(excluded)


def complement(ranges: Ranges) -> Ranges:
    """The ranges of the code points that are in none of `ranges`."""
    found, start = [], 0
    for low, high in sorted(ranges):
        if low > start:
            found.append((start, low - 1))
        start = max(start, high + 1)
    return [*found, (start, LAST_CHARACTER)] if start <= LAST_CHARACTER else found
