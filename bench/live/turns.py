"""Contenders take turns item by item, because the machine's speed changes over time. A peer is a program with some methods."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import ClassVar, Generic, Literal, NamedTuple, TypeVar

from bench.http.chat import Answer
from bench.plan import BenchError

Item = TypeVar("Item")
Transport = Literal["in process", "HTTP"]


class Contender(NamedTuple):
    """A peer and one of its methods."""

    peer: str
    method: str
    transport: Transport = "in process"


class Peer(ABC, Generic[Item]):
    """A program that holds a model and answers items."""

    name: ClassVar[str]
    transport: ClassVar[Transport] = "in process"
    packages: ClassVar[Mapping[str, str]] = {}  # the modules that it needs, and what pip installs for each
    methods: Sequence[str]

    @abstractmethod
    def answer(self, method: str, item: Item) -> Answer:
        """Answers by one of `methods`. Raises BenchError if a server refuses."""


def contenders(peers: Sequence[Peer[Item]]) -> dict[Contender, Callable[[Item], Answer]]:
    """Every method of every peer."""
    return {Contender(peer.name, each, peer.transport): partial(peer.answer, each) for peer in peers for each in peer.methods}


def take_turns(
    contenders: Mapping[Contender, Callable[[Item], Answer]],
    items: Sequence[Item],
    warm_up: Item,
    advance: Callable[[], None],
) -> dict[Contender, list[Answer]]:
    """The answers to all items.

    Every contender answers an item before the next item's turn, and each item begins with another contender. `warm_up` is
    answered first, and not measured. `advance` counts items.
    """
    order = list(contenders.items())
    answers: dict[Contender, list[Answer]] = {contender: [] for contender in contenders}
    for _, run in order:
        run(warm_up)
    advance()
    for index, item in enumerate(items):
        turn = index % len(order)
        for contender, run in (*order[turn:], *order[:turn]):
            answers[contender].append(run(item))
        advance()
    return answers


def parse_peers(text: str, known: Sequence[str]) -> list[str]:
    """Comma-separated names of peers, in the order of `known`; none for an empty text. Raises BenchError."""
    names = [name for name in text.split(",") if name]
    if unknown := [name for name in names if name not in known]:
        raise BenchError(f"There is no peer {', '.join(unknown)}; choose from {', '.join(known)}.")
    return [name for name in known if name in names]


def install_command(packages: Mapping[str, str]) -> str | None:
    """The command that installs what is missing of `packages`, or None."""
    missing = dict.fromkeys(requirement for module, requirement in packages.items() if find_spec(module) is None)
    return f"pip install {' '.join(missing)}" if missing else None
