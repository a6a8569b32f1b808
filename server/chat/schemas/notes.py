"""Notes on keywords that are not enforced: a name for a header, and a sentence for an error. Knows nothing about schemas."""

import re
from collections.abc import Sequence
from typing import NamedTuple

SAFE = re.compile(r"[A-Za-z0-9_-]{1,64}")
# The words of a name that are client's texts may have this many characters together.
MAX_NAME_CHARACTERS = 120
MAX_WORDS = 8
Path = tuple[str, ...]


class Note(NamedTuple):
    """A keyword that is not enforced."""

    path: Path  # names of properties, and keywords, that lead to its schema
    keyword: str
    reason: str = ""

    @property
    def name(self) -> str:
        """The place, such as "save.slug.pattern", of safe characters only; long names miss words in the middle."""
        words = [word if SAFE.fullmatch(word) else "unknown" for word in (*self.path, self.keyword.lstrip("$"))]
        while len(words) > MAX_WORDS or (len(words) > 2 and sum(map(len, words)) > MAX_NAME_CHARACTERS):
            del words[len(words) // 2]
        return ".".join(words)

    @property
    def sentence(self) -> str:
        words = (
            self.path if len(self.path) <= MAX_WORDS else (*self.path[: MAX_WORDS // 2], "...", *self.path[-MAX_WORDS // 2 :])
        )
        place = " at " + ".".join(word[:64] for word in words) if words else ""
        reason = f": {self.reason.removesuffix('.')}" if self.reason else ""
        return f"{self.keyword!r}{place} cannot be enforced{reason}; change or remove it."


def names(notes: Sequence[Note]) -> list[str]:
    """The names of notes, each once, in order."""
    return list(dict.fromkeys(note.name for note in notes))
