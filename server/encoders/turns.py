"""Parts of requests that wait for an encoder: principals take turns, and parts that ask for the same are encoded together."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

# At most this many texts, and characters of several texts, are in a part, and in the parts that are encoded together.
PART_TEXTS, PART_CHARACTERS = 8, 1 << 15
TEXTS, CHARACTERS = 32, 1 << 17


@dataclass(eq=False)
class Part:
    """Some texts, or pairs of texts, of a request."""

    texts: Sequence[Any]
    options: Any  # parts with equal options may be encoded together
    answer: asyncio.Future[tuple[Any, list[int]]] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Turns:
    """The waiting parts, by principal."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[Part]] = OrderedDict()  # the principal whose turn is next comes first

    def add(self, principal: str, part: Part) -> None:
        """Adds a part behind the principal's others."""
        self._waiting.setdefault(principal, deque()).append(part)

    def take(self) -> list[Part]:
        """The parts of the next batch, of one principal after the other; parts whose request has ended are dropped.

        They have equal options, and no more than TEXTS texts and CHARACTERS characters if they are several.
        """
        taken: list[Part] = []
        passed: set[str] = set()  # principals whose next part does not fit
        while principal := next((each for each in self._waiting if each not in passed), None):
            parts = self._waiting[principal]
            if not parts[0].answer.done():
                if taken and not fits(parts[0], taken):
                    passed.add(principal)
                    continue
                taken.append(parts[0])
                self._waiting.move_to_end(principal)
            parts.popleft()
            if not parts:
                del self._waiting[principal]
        return taken


def divide(texts: Sequence[Any], options: Any) -> list[Part]:
    """The parts of a request, in order."""
    parts: list[list[Any]] = []
    count = 0  # characters of the last part
    for text in texts:
        added = characters([text])
        if not parts or len(parts[-1]) == PART_TEXTS or count + added > PART_CHARACTERS:
            parts.append([])
            count = 0
        parts[-1].append(text)
        count += added
    return [Part(part, options) for part in parts]


def fits(part: Part, taken: Sequence[Part]) -> bool:
    """Whether a part may be encoded together with those taken already."""
    texts = [text for each in (*taken, part) for text in each.texts]
    return part.options == taken[0].options and len(texts) <= TEXTS and characters(texts) <= CHARACTERS


def characters(texts: Sequence[Any]) -> int:
    """The characters of texts or pairs of texts."""
    return sum(len(text) if isinstance(text, str) else sum(map(len, text)) for text in texts)
