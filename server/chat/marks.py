"""Marks that stand for special tokens in clients' text while a chat template is rendered.

Promises that such a text never becomes a special token, whatever the template puts around it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

# A mark is the number of a special token's text between these private-use characters.
START, END = "\ue0f0", "\ue0f1"
MARK = re.compile(f"{START}(\\d+){END}")


class Marks:
    """The marks of one model's special tokens."""

    def __init__(self, special: Iterable[str], encode: Callable[[str], list[int]]) -> None:
        """`encode` returns the ids of a text as plain text."""
        texts = sorted(set(special), key=lambda text: (-len(text), text))
        self._pattern = re.compile("|".join(map(re.escape, texts)) or "(?!)")
        self._numbers = {text: number for number, text in enumerate(texts)}
        self._ids = list(map(encode, texts))

    def mark(self, value: Any) -> Any:
        """A JSON value with marks in the place of special tokens, in all of its strings."""
        if isinstance(value, str):
            clean = value.replace(START, "").replace(END, "")
            return self._pattern.sub(lambda found: f"{START}{self._numbers[found[0]]}{END}", clean)
        if isinstance(value, dict):
            return {self.mark(name): self.mark(inner) for name, inner in value.items()}
        return [self.mark(inner) for inner in value] if isinstance(value, list) else value

    def encode(self, text: str, encode: Callable[[str], list[int]]) -> list[int]:
        """The ids of a text with marks; `encode` returns those of the text between them."""
        ids: list[int] = []
        for number, piece in enumerate(MARK.split(text)):  # the odd pieces are numbers
            if number % 2:
                ids += self._ids[int(piece)]
            elif piece:
                ids += encode(piece)
        return ids


def count_marks(text: str) -> int:
    """The number of marks in a text; each is at least one token."""
    return len(MARK.findall(text))
