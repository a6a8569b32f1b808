"""The format of a session's files, which are safetensors' files.

A session's own file has its text, states, what drafters have learned, the rows after the last whole page, and the digests of
its whole pages. Each page has a file of its own, named by its digest.

Promises that files whose parts are damaged, or are not those of the model, are noticed before they are used.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from outrider.drafters.interface import Ints
from outrider.server.file_errors import reason
from outrider.server.worker.storage.session_folder import PAGE, hidden
from outrider.server.worker.storage.tensor_file import BYTES, content_of, open_tensors
from outrider.verify.model.cache import kv_cache
from outrider.verify.model.cache.kv_cache import HostRows, Page, SwappedRows
from outrider.verify.model.cache.shape import CacheShape, LayerShape
from outrider.verify.model.runner import ModelRunner

if TYPE_CHECKING:
    from outrider.verify.model.recurrent.states import Snapshot

log = logging.getLogger("outrider.worker")
TEXT, ROWS = "text", "rows"
# The labels of a drafter's arrays begin with this.
LEARNED = "learned."
# ValueError is raised for damaged contents, and TypeError for a data type that numpy does not have.
UNREADABLE = (OSError, ValueError, TypeError)


class DamagedSession(ValueError):
    """The files of a session cannot be used."""

    def __init__(self, path: Path, message: str) -> None:
        super().__init__(message)
        self.path = path


@dataclass(frozen=True)
class StoredRows(SwappedRows):
    """The rows of a session in files, read when they are first needed."""

    path: Path  # file of the session
    state_digests: Sequence[str]  # digests of the snapshots, which `read` appends to the list in `snapshots`

    def read(self) -> None:
        """Reads the pages that are not in memory, and the states. Raises DamagedSession."""
        try:
            if len(self.snapshots) < len(self.state_digests):
                self._read_states()
            for index, page in enumerate(self.all_pages):
                if page.rows is None:
                    assert page.digest is not None
                    is_whole = index < self.length // kv_cache.PAGE_TOKENS
                    page.rows = read_rows(page_path(self.path.parent, page.digest) if is_whole else self.path, page.digest)
        except UNREADABLE as error:
            raise DamagedSession(self.path, f"its files cannot be used: {reason(error)}") from None

    def _read_states(self) -> None:
        from outrider.verify.model.recurrent.states import Snapshot  # imports torch

        states = cast(list[Snapshot], self.snapshots)
        with open_tensors(self.path) as file:
            for index in range(len(states), len(self.state_digests)):
                length, matrices, windows = (file.tensor(name) for name in state_names(index))
                state = Snapshot(int(length), matrices, windows)
                if state_digest(state) != self.state_digests[index]:
                    raise ValueError("its states are damaged")
                states.append(state)


def read_rows(path: Path, digest: str) -> HostRows:
    """The rows in a file. Raises one of UNREADABLE."""
    with open_tensors(path) as file:
        rows: HostRows = file.array(ROWS)
    if rows_digest(rows) != digest:
        raise ValueError("its rows are damaged")
    return rows


@dataclass(frozen=True)
class StoredSession:
    path: Path
    principal: str
    name: str | None  # None = it is found by its text
    prompt_tokens: int  # length of its last request's prompt
    text: Ints  # int32 [N]
    rows: StoredRows
    digests: Mapping[str, str]  # digests of the drafters' saved arrays

    def learned(self, drafter: str) -> dict[str, NDArray[Any]]:
        """The saved arrays of a drafter; empty if there are none, or if they are damaged, which is logged."""
        if drafter not in self.digests:
            return {}
        try:
            with open_tensors(self.path) as file:
                names = [name for name in file.entries if name.startswith(f"{drafter}:")]
                arrays = {name.partition(":")[2]: file.array(name) for name in names}
        except UNREADABLE as error:
            log.warning("what %s has learned in a saved session cannot be read: %s", drafter, reason(error))
            return {}
        if arrays_digest(arrays) != self.digests[drafter]:
            log.warning("what %s has learned in a saved session is damaged and is not used", drafter)
            return {}
        return arrays


@dataclass(frozen=True)
class Fits:
    """The shapes of a model's rows in a file, and its vocabulary."""

    whole: tuple[int, ...]  # the shape of a page, without its positions
    reduced: tuple[int, ...]  # shape of a page without the rows of layers with a window
    vocabulary: int

    @classmethod
    def of(cls, runner: ModelRunner) -> Fits:
        shape = runner.cache_shape
        lasting = tuple(each for each in shape.layers if each.window is None)
        whole, reduced = (row_shape(shape, layers) for layers in (shape.layers, lasting))
        return cls(whole, reduced, runner.vocabulary)

    def is_whole(self, shape: Sequence[int]) -> bool:
        """Whether a page with this shape, without its positions, has the rows of all layers. Raises ValueError."""
        if tuple(shape) not in (self.whole, self.reduced):
            raise ValueError("its rows have another shape")
        return tuple(shape) == self.whole


def row_shape(shape: CacheShape, layers: Sequence[LayerShape]) -> tuple[int, ...]:
    """The shape of these layers' rows in a page, without its positions (`outrider.verify.model.cache.kv_cache.HostRows`)."""
    size = shape.stored_dtype.itemsize
    if shape.is_uniform:
        return len(layers), 2, shape.kv_heads, size * shape.stored_width(shape.head_dim)
    widths = (each.heads * (shape.stored_width(each.key_dim) + shape.stored_width(each.value_dim)) for each in layers)
    return 1, 1, 1, size * sum(widths)


def open_session(path: Path, fits: Fits, known: MutableMapping[Path, Page]) -> StoredSession:
    """The session in a file. Its pages are taken from `known`, which has them by their files, or added to it.

    Raises one of UNREADABLE, or KeyError.
    """
    with open_tensors(path) as file:
        labels, text = file.labels, file.array(TEXT)
    length, prompt_tokens, principal = int(labels["length"]), int(labels["prompt_tokens"]), labels["principal"]
    if path.parent.name != hidden(principal):
        raise ValueError("it is in the folder of another principal")
    if text.ndim != 1 or text.dtype != np.int32:
        raise ValueError("its text is damaged")
    if not 0 < prompt_tokens <= len(text) or not 0 <= length < len(text):
        raise ValueError("its parts do not fit together")
    if text_digest(text) != labels["text"] or not ((text >= 0) & (text < fits.vocabulary)).all():
        raise ValueError("its text is damaged or not of this model")
    whole, rest = divmod(length, kv_cache.PAGE_TOKENS)
    files = named_pages(path, labels)
    if len(files) != whole:
        raise ValueError("its pages are not those of its text")
    pages = [known.get(file) or known.setdefault(file, open_page(file, fits, kv_cache.PAGE_TOKENS)) for file in files]
    if rest:
        pages.append(open_page(path, fits, rest, labels["rest"]))
    rows = StoredRows(pages, length, [], path, labels["states"].split())
    learned = {label.removeprefix(LEARNED): digest for label, digest in labels.items() if label.startswith(LEARNED)}
    return StoredSession(path, principal, labels.get("name"), prompt_tokens, text, rows, learned)


def open_page(path: Path, fits: Fits, length: int, digest: str | None = None) -> Page:
    """The page of `length` rows in a file, not yet read. The name of a page's own file is its digest.

    Raises one of UNREADABLE.
    """
    with open_tensors(path) as file:
        rows = file.entry(ROWS)
    shape = list(rows.shape)
    if len(shape) != 5 or shape.pop(3) != length or rows.dtype != BYTES:
        raise ValueError("its rows are not those of this model")
    return Page(is_whole=fits.is_whole(shape), digest=digest or path.stem)


def named_pages(path: Path, labels: Mapping[str, str]) -> list[Path]:
    """The files of the whole pages of a session with these labels. Raises KeyError or ValueError."""
    digests = labels["pages"].split()
    for digest in digests:
        bytes.fromhex(digest)  # raises ValueError for anything else, such as a path to another folder
    return [page_path(path.parent, digest) for digest in digests]


def page_path(folder: Path, digest: str) -> Path:
    return folder / f"{digest}{PAGE}"


def labels_of(path: Path) -> dict[str, str]:
    """The labels of a session's file. Raises one of UNREADABLE."""
    with open_tensors(path) as file:
        return file.labels


def state_names(index: int) -> tuple[str, str, str]:
    """The names of a snapshot's parts in a file."""
    return f"state.{index}.length", f"state.{index}.states", f"state.{index}.windows"


def state_digest(state: Snapshot) -> str:
    """A checksum of a snapshot; equal for equal ones only."""
    return f"{state.length}-{rows_digest(state.matrices)}-{rows_digest(state.windows)}"


def state_tensors(states: Sequence[Snapshot]) -> dict[str, Any]:
    parts = [(np.array(each.length), each.matrices, each.windows) for each in states]
    return {name: part for index, each in enumerate(parts) for name, part in zip(state_names(index), each, strict=True)}


def text_digest(text: Ints) -> str:
    """A checksum of a text, int32 [N]."""
    return hashlib.blake2b(np.ascontiguousarray(text).tobytes(), digest_size=16).hexdigest()


def rows_digest(rows: Any) -> str:
    """A checksum of rows in host memory, and of their type and shape."""
    digest = hashlib.blake2b(f"{rows.dtype} {tuple(rows.shape)}\n".encode(), digest_size=16)
    digest.update(content_of(rows))
    return digest.hexdigest()


def arrays_digest(arrays: Mapping[str, NDArray[Any]]) -> str:
    """A checksum of a drafter's arrays and their names, types and shapes."""
    digest = hashlib.blake2b(digest_size=16)
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype} {array.shape}\n".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()
