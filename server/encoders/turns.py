"""Parts of requests that wait for an encoder: principals take turns, and parts that ask for the same are encoded together."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

# Texts of a part, and at most of the parts that are encoded together.
PART, TOGETHER = 8, 32


@dataclass(eq=False)
class Part:
    """Some texts of a request."""

    texts: Sequence[Any]
    options: Any  # parts with equal options may be encoded together
    answer: asyncio.Future[tuple[Any, list[int]]] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Turns:
    """The waiting parts, by principal."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[Part]] = OrderedDict()  # the principal whose turn is next comes first

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, principal: str, part: Part) -> None:
        """Adds a part behind the principal's others."""
        self._waiting.setdefault(principal, deque()).append(part)

    def take(self) -> list[Part]:
        """The parts of the next batch, of one principal after the other; parts whose request has ended are dropped.

        They have equal options, and no more than TOGETHER texts if they are several.
        """
        taken: list[Part] = []
        passed: set[str] = set()  # principals whose next part does not fit
        while principal := next((each for each in self._waiting if each not in passed), None):
            parts = self._waiting[principal]
            if not parts[0].answer.done():
                if taken and (parts[0].options != taken[0].options or size(taken) + len(parts[0].texts) > TOGETHER):
                    passed.add(principal)
                    continue
                taken.append(parts[0])
                self._waiting.move_to_end(principal)
            parts.popleft()
            if not parts:
                del self._waiting[principal]
        return taken


def size(parts: Sequence[Part]) -> int:
    """The texts of all parts."""
    return sum(len(part.texts) for part in parts)
