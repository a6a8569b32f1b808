"""The corpora of all principals as they are in folders, and how much they take in the folders of all models.

`outrider.server.corpora.registry` changes them.
"""

import asyncio
import contextlib
import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from outrider.server.corpora.messages import LISTING, Listing, decode_listing, is_private, read_file
from outrider.server.http.errors import APIError

FOLDER = "corpora"
# This file of a principal's folder names its default corpus. No corpus has a folder of such a name.
DEFAULT = ".default"


@dataclass
class Shelf:
    folder: Path
    corpora: dict[str, Listing] = field(default_factory=dict)  # by name
    default: str | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # held during a change

    def folder_of(self, name: str) -> Path:
        """The folder of a corpus: some systems know no difference between the names "A" and "a"."""
        return self.folder / short_digest(name)

    def size_bytes(self, but: str = "") -> int:
        return sum(corpus.size_bytes for name, corpus in self.corpora.items() if name != but)


class Shelves:
    def __init__(self, roots: Iterable[Path] = ()) -> None:
        """Finds the corpora below the folders `roots`, one for each tokenizer. Reads files."""
        self._shelves: dict[str, Shelf] = {}  # by the name of the principal's folder
        for path in (path for root in roots for path in root.glob(f"*/*/{LISTING}")):
            shelf = self._shelves.setdefault(path.parents[1].name, Shelf(path.parents[1]))
            with contextlib.suppress(OSError, ValueError):
                corpus = decode_listing(read_file(path))
                is_its_own = shelf.folder_of(corpus.name) == path.parent
                if is_private(shelf.folder) and is_its_own and (path.parent / corpus.block).exists():
                    shelf.corpora[corpus.name] = corpus
        for shelf in self._shelves.values():
            with contextlib.suppress(OSError, ValueError):
                name = read_file(shelf.folder / DEFAULT).decode()
                shelf.default = name if name in shelf.corpora else None

    def of(self, principal: str) -> Mapping[str, Listing]:
        shelf = self._find(principal)
        return shelf.corpora if shelf else {}

    def default_of(self, principal: str) -> str | None:
        """The name of the corpus that is used by requests which choose none."""
        shelf = self._find(principal)
        return shelf.default if shelf else None

    def get(self, principal: str, name: str) -> Listing:
        """A corpus. Raises APIError if the principal has none of this name."""
        found = self.of(principal).get(name)
        if found is None:
            message = f"There is no corpus {name!r}; POST /v1/outrider/corpora makes one, and GET lists those that exist."
            raise APIError(404, message, "corpus", "corpus_not_found")
        return found

    @property
    def sizes(self) -> Counter[str]:
        """The bytes by principal's folder."""
        return Counter({name: shelf.size_bytes() for name, shelf in self._shelves.items()})

    def _find(self, principal: str) -> Shelf | None:
        return self._shelves.get(short_digest(principal))


class Usage:
    """The bytes of all models' corpora, by the models' folders. A model that is not loaded is read once."""

    def __init__(self, sessions: Sequence[Path] = ()) -> None:
        """`sessions`: the folders of the models' sessions."""
        self._folders = [each.expanduser() / FOLDER for each in sessions]
        self._sizes: dict[Path, Counter[str]] = {}
        self.lock = asyncio.Lock()  # held during a change, so that no two of them take the same room

    def record(self, folder: Path, sizes: Counter[str]) -> None:
        """The corpora in a folder take these bytes, by principal's folder."""
        self._sizes[folder] = sizes

    def elsewhere(self, folder: Path) -> Counter[str]:
        """The bytes in all other folders, by principal's folder. Reads files."""
        for each in self._folders:
            if each not in self._sizes:
                self._sizes[each] = stored(each).sizes
        return sum((sizes for each, sizes in self._sizes.items() if each != folder), Counter[str]())


def stored(folder: Path) -> Shelves:
    """The corpora of a model that is not loaded. Reads files."""
    return Shelves(sorted(folder.glob("*")))


def short_digest(text: str) -> str:
    """A digest of 32 hexadecimal digits."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
