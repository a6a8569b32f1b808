"""Breaks the lines of an answer between words, as it arrives.

Promises that every character is shown at once: a word that turns out too long for its line is taken to the next one. Code
between lines of three backticks keeps its lines, so that it can be copied.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterator

FENCE = "```"
TAB_COLUMNS = 8
LEFT = "\x1b[{}D"  # moves the cursor
ERASE = "\x1b[K"  # the rest of the line
# Emoji are joined by this character.
JOINER = "\u200d"


class Wrapper:
    """The line that is being written to a terminal."""

    def __init__(self, columns: Callable[[], int]) -> None:
        """`columns`: the width of the terminal, which may change."""
        self._columns = columns
        self._column = 0
        self._word = ""  # the last one of the line
        self._start = ""  # of the line
        self._is_joined = False  # the last character joins the next one to it
        self._is_code = False

    def feed(self, text: str) -> str:
        """What to write for the next text."""
        return "".join(self._characters(text))

    def _characters(self, text: str) -> Iterator[str]:
        columns = self._columns()
        for character in text:
            width = self._width(character)
            if self._column + width > columns and not self._is_code:
                if character.isspace():
                    self._break()  # which stands for the space
                    yield "\n"
                    continue
                yield from self._moved(columns, width)
            yield character
            self._is_joined = character == JOINER
            if character == "\n":
                self._is_code ^= self._start.lstrip().startswith(FENCE)
                self._start = ""
                self._break()
                continue
            self._word = "" if character.isspace() or width == 2 else self._word + character
            self._start += character if len(self._start) < columns else ""
            self._column += width

    def _break(self) -> None:
        self._column, self._word = 0, ""

    def _moved(self, columns: int, width: int) -> Iterator[str]:
        """Takes the last word to the next line, unless it fills the line or a wide character follows it."""
        word, size = self._word, sum(map(self._width, self._word))
        is_split = size == self._column or width == 2
        if size and not is_split:
            moves = size - (self._column == columns)  # at the end of a line, the cursor stays on the last character
            yield (LEFT.format(moves) if moves else "") + ERASE
        yield "\n"
        self._break()
        if not is_split:
            yield word
            self._column, self._word = size, word

    def _width(self, character: str) -> int:
        """The columns that a character takes."""
        if character == "\t":
            return TAB_COLUMNS - self._column % TAB_COLUMNS
        if character == "\n" or self._is_joined or unicodedata.category(character) in ("Mn", "Me", "Cf"):
            return 0
        return 2 if unicodedata.east_asian_width(character) in "WF" else 1
