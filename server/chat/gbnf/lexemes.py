"""Finds the ends of lexemes, so that llguidance's lexer loses no text that a grammar allows.

llguidance matches all lexemes that may stand at a place at once, and ends them where no byte continues any. So a lexeme is lost
if its text may be followed by a byte with which another one, or a longer text of its own, goes on. Where that is possible, the
longer one is cut in two. In the end, every lexeme may be one character, and these are never lost.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator

from outrider.server.chat.gbnf.nodes import Characters, Node, Reference, Repeat, Series, Token
from outrider.server.chat.gbnf.parser import ROOT
from outrider.server.chat.gbnf.rules import Rules

# Ways to go on that are followed: less than a second.
MAX_STEPS = 300_000

# What one node follows another in: a series, with the indexes of the children where they stand, or a repetition.
Junction = tuple[Node, int, int]
# The first bytes of characters with which a node may begin, by the node that they end.
Starts = dict[Node, int]


class LexemeCutter:
    """Marks nodes of rules as structured, and cuts series, until no lexeme is lost."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._root = rules.bodies[ROOT]
        self._starts: dict[Node, Starts] = {}
        self._after: dict[Node, dict[Junction, Node]] = {}
        self._steps = 0

    def cut(self) -> None:
        """Raises ValueError if that takes too long."""
        while self._root.structured and self._cuts():
            pass

    def _cuts(self) -> bool:
        """Follows all ways to read the same text at once, and cuts where only some end a lexeme; whether it has cut."""
        junctions: set[Junction] = set()  # to cut
        # What may come next at a place, and the junction before it if that is inside a lexeme.
        start: frozenset[tuple[Node, Junction | None]] = frozenset([(self._root, None)])
        todo, places = [start], {start}
        texts: set[frozenset[Node]] = set()  # nodes that end with the same text
        while todo:
            place = todo.pop()
            for ends in self._read(place, junctions):
                if ends in texts:
                    continue
                texts.add(ends)
                place = frozenset(
                    (node, junction if is_inside(junction) else None)
                    for end in ends
                    for junction, node in self._following(end).items()
                )
                self._spend(len(place))
                if place not in places:
                    places.add(place)
                    todo.append(place)
        for node, _, index in junctions:
            if isinstance(node, Series):
                node.cuts.add(index)
            self._rules.mark(node)
        return bool(junctions)

    def _read(self, place: Collection[tuple[Node, Junction | None]], cut: set[Junction]) -> Iterator[frozenset[Node]]:
        """The nodes that each group of characters may end at a place. Adds the junctions to `cut`."""
        by_first: dict[int, list[tuple[Node, Junction | None]]] = defaultdict(list)
        for node, junction in place:
            for end, first in self._starts_of(node).items():
                by_first[first].append((end, junction))
        for firsts in parted(by_first):
            ways = [way for first in firsts for way in by_first[first]]
            self._spend(len(ways))
            inside = {junction for _, junction in ways if junction is not None}
            if inside and not all(junction is not None for _, junction in ways):
                cut |= inside
            yield frozenset(end for end, _ in ways)

    def _spend(self, steps: int) -> None:
        self._steps += steps
        if self._steps > MAX_STEPS:
            raise ValueError("too many of its alternatives can begin with the same characters; simplify it")

    def _starts_of(self, node: Node) -> Starts:
        if node not in self._starts:
            found: Starts = defaultdict(int)
            seen: set[str] = set()
            todo = [node]
            while todo:
                inner = todo.pop()
                self._spend(1)
                if isinstance(inner, Characters | Token):
                    found[last_of(inner)] |= inner.first_bytes
                elif isinstance(inner, Reference):
                    if inner.name not in seen:
                        seen.add(inner.name)
                        todo.append(self._rules.bodies[inner.name])
                else:
                    for child in inner.children:
                        todo.append(child)
                        if isinstance(inner, Series) and not child.empty:
                            break
            self._starts[node] = found
        return self._starts[node]

    def _following(self, node: Node) -> dict[Junction, Node]:
        """The nodes that may follow a node, by the junction before it."""
        if node not in self._after:
            found: dict[Junction, Node] = {}
            seen: set[Node] = set()
            todo = [node]
            while todo:
                inner = todo.pop()
                if inner in seen:
                    continue
                seen.add(inner)
                if inner.parent is None:
                    todo.extend(self._rules.uses[inner.rule])
                elif self._passes(inner, inner.parent, found):
                    todo.append(inner.parent)
                self._spend(1)
            self._after[node] = found
        return self._after[node]

    def _passes(self, node: Node, parent: Node, found: dict[Junction, Node]) -> bool:
        """Adds what may follow `node` in its parent; whether what follows the parent may follow, too."""
        if isinstance(parent, Series):
            for child in parent.children[node.index + 1 :]:
                self._spend(1)
                found[parent, node.index, child.index] = self._target(child)
                if not child.empty:
                    return False
        elif isinstance(parent, Repeat) and parent.high != 1:
            found[parent, 0, 0] = self._target(node)
        return True

    def _target(self, node: Node) -> Node:
        return self._rules.bodies[node.name] if isinstance(node, Reference) else node


def parted(sets: Iterable[int]) -> Iterator[list[int]]:
    """The largest groups of sets of bytes, given as bits, that share a byte which is in no other set."""
    parts: list[tuple[int, list[int]]] = []  # bytes that are in the same sets, and these sets
    for each in sets:
        rest, split = each, []
        for common, members in parts:
            if both := common & each:
                rest &= ~both
                split.append((both, [*members, each]))
            if apart := common & ~each:
                split.append((apart, members))
        parts = [*split, (rest, [each])] if rest else split
    return (members for _, members in parts)


def last_of(node: Node) -> Node:
    """The outermost node that ends where a node does, so that the same may follow it."""
    while isinstance(parent := node.parent, Node) and not (
        parent.high != 1 if isinstance(parent, Repeat) else isinstance(parent, Series) and parent.children[-1] is not node
    ):
        node = parent
    return node


def is_inside(junction: Junction) -> bool:
    """Whether both sides of a junction are in the same lexeme."""
    node, start, end = junction
    if not node.structured or not isinstance(node, Series):
        return not node.structured
    is_run = not any(child.structured for child in node.children[start : end + 1])
    return is_run and not any(start < cut <= end for cut in node.cuts)
