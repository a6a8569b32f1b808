"""Writes the rules of a grammar in llguidance's dialect of Lark."""

import json
from collections.abc import Callable, Iterator, Sequence

from outrider.server.chat.gbnf.nodes import Characters, Choice, Node, Reference, Repeat, Series, Token, nodes_of
from outrider.server.chat.gbnf.parser import ROOT
from outrider.server.chat.gbnf.rules import Rules

EMPTY = '""'
# llguidance writes an ordinary token that it forces as a special one, and cannot take it back.
NOT_FORCED = '%llguidance {"no_forcing": true}'


class Writer:
    """Writes structured nodes as rules, and each regular one as a lexeme."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._numbers = {name: number for number, name in enumerate(rules.bodies)}
        self._lexemes: dict[str, str] = {}  # names by definition

    def write(self) -> str:
        rules, terminals = [], []
        if any(isinstance(node, Token) for body in self._rules.bodies.values() for node in nodes_of(body)):
            rules.append(NOT_FORCED)
        for name, body in self._rules.bodies.items():
            if body.structured or name == ROOT:
                rules.append(f"{self._name(name)}: {self._rule(body)}")
            else:
                terminals.append(f"{self._name(name)}: {regular([body], self._name)}")
        return "\n".join([*rules, *(f"{name}: {text}" for text, name in self._lexemes.items()), *terminals])

    def _name(self, rule: str) -> str:
        if rule == ROOT:
            return "start"
        return f"{'rule' if self._rules.bodies[rule].structured else 'RULE'}_{self._numbers[rule]}"

    def _rule(self, node: Node) -> str:
        match node:
            case _ if not node.structured:
                return self._lexeme([node])
            case Token():
                return node.lark
            case Reference():
                return self._name(node.name)
            case Repeat():
                return f"({self._rule(node.children[0])}){times(node)}"
            case Series():
                return f"({' '.join(self._parts(node))})"
        return f"({' | '.join(self._rule(child) for child in node.children)})"

    def _parts(self, node: Series) -> Iterator[str]:
        """The parts of a series in a rule; what is regular and not cut is one lexeme."""
        run: list[Node] = []
        for child in node.children:
            if run and (child.structured or child.index in node.cuts):
                yield self._lexeme(run)
                run = []
            if child.structured:
                yield self._rule(child)
            else:
                run.append(child)
        if run:
            yield self._lexeme(run)

    def _lexeme(self, nodes: Sequence[Node]) -> str:
        """The name of the terminal of regular nodes in series."""
        if len(nodes) == 1 and isinstance(nodes[0], Reference):
            return self._name(nodes[0].name)
        return self._lexemes.setdefault(regular(nodes, self._name), f"TEXT_{len(self._lexemes)}")


def regular(nodes: Sequence[Node], name_of: Callable[[str], str]) -> str:
    """Regular nodes in series, as a terminal."""
    parts: list[str] = []
    text = ""
    for node in [*nodes, Series()]:
        if isinstance(node, Characters) and (only := single(node)):
            text += only
            continue
        if text:
            parts.append(json.dumps(text, ensure_ascii=False))
            text = ""
        match node:
            case Characters():
                parts.append(f"/[{''.join(map(range_text, node.ranges))}]/")
            case Reference():
                parts.append(name_of(node.name))
            case Repeat():
                parts.append(f"({regular(node.children, name_of)}){times(node)}")
            case Choice():
                parts.append(f"({' | '.join(regular([child], name_of) for child in node.children)})")
            case Series() if node.children:
                parts.append(regular(node.children, name_of))
    return " ".join(parts) or EMPTY


def single(node: Characters) -> str:
    """The character of a class of one that a string may contain; otherwise nothing."""
    low, high = node.ranges[0]
    is_one = len(node.ranges) == 1 and low == high
    return chr(low) if is_one and (chr(low).isprintable() or chr(low) in "\n\r\t") else ""


def range_text(ends: tuple[int, int]) -> str:
    """A range of a class, as a regex writes it."""
    low, high = (f"\\x{{{end:x}}}" for end in ends)
    return low if low == high else f"{low}-{high}"


def times(node: Repeat) -> str:
    if (node.low, node.high) == (0, 1):
        return "?"
    if node.high is None and node.low < 2:
        return "+" if node.low else "*"
    return f"{{{node.low},{'' if node.high is None else node.high}}}"
