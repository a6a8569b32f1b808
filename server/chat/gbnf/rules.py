"""The rules of a grammar, rewritten so that what repeats is one lexeme, with which nodes are structured and which may be empty.

The language stays the same. Takes time linear in the size of the grammar.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from outrider.server.chat.gbnf.nodes import Characters, Choice, Node, Reference, Repeat, Series, choice, nodes_of, series
from outrider.server.chat.gbnf.parser import ROOT


class Rules:
    """The bodies of the rules that `root` reaches, by name."""

    def __init__(self, bodies: Mapping[str, Node]) -> None:
        self.bodies: dict[str, Node] = {}
        self.uses: dict[str, list[Reference]] = defaultdict(list)
        self._halves: dict[str, list[tuple[str, bool]]] = {}  # of rules, by name: the halves' names, and whether structured
        for name in reached(bodies):
            self._set(name, bodies[name])
        for name in list(self.bodies):
            self._unwind(name)
        self._link()
        for body in list(self.bodies.values()):
            for node in list(nodes_of(body)):
                if isinstance(node, Repeat) and node.structured and node.high is None and node.low < 2:
                    self._gather(node)
        self._link()
        nodes = self._nodes()
        seeds = [node for node in nodes if (node.low == 0 if isinstance(node, Repeat) else is_nothing(node))]
        for node in self._spread(seeds, (Choice, Repeat)):
            node.empty = True

    def mark(self, node: Node) -> None:
        """Makes a node structured, and with it all that contain it."""
        todo = [node]
        while todo:
            inner: Node | None = todo.pop()
            while inner is not None and not inner.structured:
                inner.structured = True
                if inner.parent is None:
                    todo.extend(self.uses[inner.rule])
                inner = inner.parent

    def _set(self, name: str, body: Node) -> None:
        body.parent, body.rule = None, name
        self.bodies[name] = body

    def _add(self, body: Node) -> str:
        """Makes a rule. Its name is none that a grammar can have."""
        name = f"#{len(self.bodies)}"
        self._set(name, body)
        return name

    def _unwind(self, name: str) -> None:
        """Writes a rule whose alternatives refer to itself at one end only as a repetition."""
        body = self.bodies[name]
        alternatives = body.children if isinstance(body, Choice) else [body]
        kinds = [recursion(name, parts_of(alternative)) for alternative in alternatives]
        left, right = "left" in kinds, "right" in kinds or "optional" in kinds
        if left == right or "both" in kinds or not {"none", "optional"} & set(kinds):
            return
        again: list[Node] = []
        once: list[Node] = []
        for kind, alternative in zip(kinds, alternatives, strict=True):
            parts = parts_of(alternative)
            if kind == "none":
                once.append(alternative)
            elif kind == "left":
                again.append(series(parts[1:]))
            elif kind == "right":
                again.append(series(parts[:-1]))
            elif kind == "optional":
                head = self._add(series(parts[:-1]))
                again.append(series([Reference(head), *parts_of(parts[-1].children[0])[:-1]]))
                once.append(Reference(head))
        repeat = Repeat(choice(again), 0, None)
        self._set(name, Series([choice(once), repeat] if left else [repeat, choice(once)]))

    def _gather(self, repeat: Repeat) -> None:
        """Makes one lexeme of the regular alternatives of a repetition: (R | S)* becomes (R* S)* R*."""
        body = repeat.children[0]
        alternatives = [
            half
            for child in (body.children if isinstance(body, Choice) else [body])
            for half in (self._halves_of(child) if isinstance(child, Reference) and child.structured else [child])
        ]
        regular = [node for node in alternatives if not node.structured]
        structured = [node for node in alternatives if node.structured]
        if not regular or not structured:
            return
        name = self._add(choice(regular))
        once = series([Repeat(Reference(name), 0, None), choice(structured)])
        some: Node = Series([Repeat(once, repeat.low, None), Repeat(Reference(name), 0, None)])
        if repeat.low:
            some = choice([Repeat(Reference(name), 1, None), some])
        self._replace(repeat, some)

    def _halves_of(self, reference: Reference) -> list[Node]:
        """New references to the regular and to the structured alternatives of a rule, which become rules."""
        name, seen = reference.name, {reference.name}
        while isinstance(body := self.bodies[name], Reference) and body.name not in seen:
            name = body.name
            seen.add(name)
        if isinstance(body, Choice) and name not in self._halves:
            self._halves[name] = []
            for structured in (False, True):
                if half := [child for child in body.children if child.structured == structured]:
                    self._halves[name].append((self._add(choice(half)), structured))
            self._set(name, choice([Reference(half) for half, _ in self._halves[name]]))
        halves: list[Node] = []
        for half_name, structured in self._halves.get(name, [(name, True)]):
            halves.append(Reference(half_name))
            halves[-1].structured = structured
        return halves

    def _replace(self, node: Node, new: Node) -> None:
        if node.parent is None:
            self._set(node.rule, new)
        else:
            new.parent, new.index = node.parent, node.index
            node.parent.children[node.index] = new

    def _link(self) -> None:
        """Finds the uses of the rules, and marks the structured nodes."""
        self.uses.clear()
        nodes = self._nodes()
        for node in nodes:
            if isinstance(node, Reference):
                self.uses[node.name].append(node)
        regular = self._spread([node for node in nodes if isinstance(node, Characters) or is_nothing(node)], ())
        for node in nodes:
            node.structured = node not in regular

    def _spread(self, seeds: Sequence[Node], enough: tuple[type[Node], ...]) -> Collection[Node]:
        """The seeds, and the nodes of which all children are found; of `enough`, one child. A rule's uses are like its body."""
        found: set[Node] = set()
        missing: dict[Node, int] = {}  # children by parent
        todo = list(seeds)
        while todo:
            node = todo.pop()
            if node in found:
                continue
            found.add(node)
            parent = node.parent
            if parent is None:
                todo.extend(self.uses[node.rule])
                continue
            missing[parent] = missing.get(parent, len(parent.children)) - 1
            if not missing[parent] or isinstance(parent, enough):
                todo.append(parent)
        return found

    def _nodes(self) -> list[Node]:
        return [node for body in self.bodies.values() for node in nodes_of(body)]


def reached(bodies: Mapping[str, Node]) -> Collection[str]:
    """The names of the rules that `root` reaches, and its own."""
    found = {ROOT: None}  # keeps the order
    todo = [ROOT]
    while todo:
        for node in nodes_of(bodies[todo.pop()]):
            if isinstance(node, Reference) and node.name not in found:
                found[node.name] = None
                todo.append(node.name)
    return found


def recursion(name: str, parts: Sequence[Node]) -> str:
    """The end at which nodes refer to the rule `name`: "left", "right", "both", or "optional" at an optional end."""
    ends = [isinstance(part, Reference) and part.name == name for part in (parts[0], parts[-1])] if parts else [False, False]
    if all(ends):
        return "itself" if len(parts) == 1 else "both"
    if any(ends):
        return "left" if ends[0] else "right"
    if parts and isinstance(tail := parts[-1], Repeat) and (tail.low, tail.high) == (0, 1):
        return "optional" if recursion(name, parts_of(tail.children[0])) == "right" else "none"
    return "none"


def parts_of(node: Node) -> list[Node]:
    """The nodes of a series; otherwise the node alone."""
    return node.children if isinstance(node, Series) else [node]


def is_nothing(node: Node) -> bool:
    return isinstance(node, Series) and not node.children
