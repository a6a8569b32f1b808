"""A vocabulary's texts as a GGUF file has them, and their ids, without an object for each text.

Without the compiled library, texts are found by a loop, and ids are those of a dict.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from outrider.verify.gguf.native.library import LIBRARY, address

LENGTH = struct.Struct("<Q")  # of a text
# Vocabularies are smaller than this; places in one are 32-bit numbers.
MOST_BYTES = 1 << 31
NOT_UTF8 = -2


class Texts(Sequence[str]):
    """Texts, each of which is decoded when it is used."""

    def __init__(self, content: bytes, starts: NDArray[np.uint32]) -> None:
        """`content` has each text after its length. `starts` [N + 1] are their places, the last one that of a further text."""
        self.content, self.starts = content, starts

    @classmethod
    def of(cls, texts: Sequence[str]) -> Texts:
        """The same texts in this form."""
        if isinstance(texts, Texts):
            return texts
        encoded = [text.encode("utf-8", "surrogatepass") for text in texts]
        sizes = np.array([LENGTH.size, *(len(text) + LENGTH.size for text in encoded)], np.int64)
        return cls(b"".join(LENGTH.pack(len(text)) + text for text in encoded), sizes.cumsum().astype(np.uint32))

    def __len__(self) -> int:
        return len(self.starts) - 1

    @overload
    def __getitem__(self, at: int) -> str: ...
    @overload
    def __getitem__(self, at: slice) -> list[str]: ...
    def __getitem__(self, at: int | slice) -> str | list[str]:
        if isinstance(at, slice):
            return [self[each] for each in range(*at.indices(len(self)))]
        place = range(len(self))[at]
        start, end = self.starts[place : place + 2].tolist()
        return self.content[start : end - LENGTH.size].decode("utf-8", "surrogatepass")

    def __iter__(self) -> Iterator[str]:
        places, content = self.starts.tolist(), self.content
        for start, end in pairwise(places):  # a vocabulary has many texts, so this loop is a plain one
            yield content[start : end - LENGTH.size].decode("utf-8", "surrogatepass")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and [*self] == [*other]

    __hash__ = None  # type: ignore[assignment]

    @property
    def longest(self) -> int:
        sizes, most = np.diff(self.starts.astype(np.int64)) - LENGTH.size, 0
        for id in np.argsort(-sizes, kind="stable").tolist():
            if sizes[id] <= most:  # in bytes, of which no text has fewer than characters
                break
            most = max(most, len(self[id]))
        return most


def read_texts(content: Any, position: int, count: int) -> tuple[Texts, int]:
    """The texts from a position of a file, and the position after them. Raises ValueError and struct.error."""
    size = min(len(content) - position, MOST_BYTES)
    if count * LENGTH.size > size:
        raise ValueError("it ends within a text")
    if LIBRARY is not None:
        starts = np.empty(count + 1, np.uint32)
        whole = np.frombuffer(content, np.uint8)
        used = LIBRARY.pieces_scan(address(whole) + position, size, count, address(starts))
        del whole  # the file can be closed
        if used >= 0:
            return Texts(content[position : position + used], starts), position + used
        if used != NOT_UTF8:
            raise ValueError("it ends within a text")
    found, place = [], position
    for _ in range(count):
        start = place + LENGTH.size
        place = start + LENGTH.unpack_from(content, place)[0]
        if place > len(content):
            raise ValueError("it ends within a text")
        found.append(content[start:place].decode("utf-8", "replace"))
    return Texts.of(found), place


class Ids(Mapping[str, int]):
    """The ids by text; of equal texts, the last one's. Requires the library."""

    def __init__(self, texts: Texts) -> None:
        assert LIBRARY is not None
        self._library, self._texts = LIBRARY, texts  # which the handle's functions read
        self.handle = LIBRARY.pieces_new(texts.content, address(texts.starts), len(texts))

    def __del__(self) -> None:
        self._library.pieces_delete(self.handle)

    def __deepcopy__(self, _: Any) -> Ids:
        return self  # it never changes

    def get(self, text: str, default: Any = None) -> Any:
        try:
            given = text.encode("utf-8", "surrogatepass")
        except AttributeError:
            return default
        found = self._library.pieces_find(self.handle, given, len(given))
        return default if found < 0 else found

    def __getitem__(self, text: str) -> int:
        found = self.get(text)
        if found is None:
            raise KeyError(text)
        return int(found)

    def __contains__(self, text: object) -> bool:
        return isinstance(text, str) and self.get(text) is not None

    def __iter__(self) -> Iterator[str]:
        return (text for id, text in enumerate(self._texts) if self.get(text) == id)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def ids_of(texts: Texts) -> Mapping[str, int]:
    return {text: id for id, text in enumerate(texts)} if LIBRARY is None else Ids(texts)
