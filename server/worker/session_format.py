"""What a session's file holds, in safetensors' format: text, rows, states, what drafters have learned, and their checksums.

Promises that a file whose parts are damaged, or are not those of the model, is noticed before they are used.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from outrider.drafters.interface import Ints
from outrider.drafters.options import DrafterName
from outrider.verify.model.cache.paging import PAGE_TOKENS, Page, SwappedRows
from outrider.verify.model.cache.shape import CacheShape, LayerShape
from outrider.verify.model.recurrent.states import Snapshot
from outrider.verify.model.runner import ModelRunner
from outrider.verify.verifier import TreeVerifier

log = logging.getLogger("outrider.worker")
TEXT = "text"
CHUNK_BYTES = 1 << 20  # written between two looks whether to stop
SAVED_STATES = 2  # of a session's recurrent layers: at its end, and before
LEARNED = "learned."  # begins the label of a drafter's arrays
NO_DIGEST = "0" * 32
TYPES = {  # safetensors' names
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
UNREADABLE = (OSError, SafetensorError, TypeError)  # the last one for a data type that numpy does not have


class DamagedSession(ValueError):
    """The file of a session cannot be used."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path} {reason}")
        self.path = path


@dataclass(frozen=True)
class StoredRows(SwappedRows):
    """The rows of a session in a file, read when they are first needed."""

    path: Path
    digests: Sequence[str]  # of all pages
    state_digests: Sequence[str]  # of the snapshots, which `read` appends to the list in `snapshots`

    def states(self, length: int) -> Sequence[Snapshot]:
        """As in `outrider.verify.model.cache.paging.Rows`. Raises DamagedSession."""
        self.read()
        return super().states(length)

    def parts(self, length: int) -> Iterator[torch.Tensor]:
        """The first `length` rows page by page, as in `Rows.parts`. Raises DamagedSession."""
        self.read()
        return super().parts(length)

    def read(self) -> None:
        """Reads the pages that are not in memory. Raises DamagedSession."""
        missing = {index: page for index, page in enumerate(self.all_pages) if page.rows is None}
        if not missing and len(self.snapshots) == len(self.state_digests):
            return
        try:
            with safe_open(self.path, "pt") as file:
                self._read_states(file)
                for index, page in missing.items():
                    rows: torch.Tensor = file.get_tensor(page_name(index)).clone()  # does not keep the file mapped
                    if rows_digest(rows) != self.digests[index]:
                        raise DamagedSession(self.path, "is damaged.")
                    page.rows = rows
        except (OSError, SafetensorError) as error:
            raise DamagedSession(self.path, f"cannot be read: {error}") from None

    def _read_states(self, file: Any) -> None:
        states = cast(list[Snapshot], self.snapshots)
        for index in range(len(states), len(self.state_digests)):
            length, matrices, windows = (file.get_tensor(name).clone() for name in state_names(index))
            state = Snapshot(int(length), matrices, windows)
            if state_digest(state) != self.state_digests[index]:
                raise DamagedSession(self.path, "is damaged.")
            states.append(state)


@dataclass(frozen=True)
class StoredSession:
    """A session in a file."""

    path: Path
    principal: str
    name: str | None  # None = it is found by its text
    prompt_tokens: int  # of its last request
    text: Ints  # int32 [N]
    rows: StoredRows
    digests: Mapping[str, str]  # of the drafters' saved arrays

    def learned(self, drafter: str) -> dict[str, NDArray[Any]]:
        """The saved arrays of a drafter; empty if there are none, or if they are damaged, which is logged."""
        if drafter not in self.digests:
            return {}
        try:
            with safe_open(self.path, "np") as file:
                names = [name for name in file.keys() if name.startswith(f"{drafter}:")]  # noqa: SIM118
                arrays = {name.partition(":")[2]: file.get_tensor(name) for name in names}
        except UNREADABLE as error:
            log.warning("what %s has learned cannot be read from %s: %s", drafter, self.path, error)
            return {}
        if arrays_digest(arrays) != self.digests[drafter]:
            log.warning("what %s has learned is damaged in %s and is not used", drafter, self.path)
            return {}
        return arrays


@dataclass(frozen=True)
class Fits:
    """What the rows and tokens of a model look like in a file."""

    type: str  # safetensors' name of the rows' data type
    whole: tuple[int, ...]  # the shape of a page, without its positions
    reduced: tuple[int, ...]  # of a page without the rows of layers with a window
    vocabulary: int

    @classmethod
    def of(cls, runner: ModelRunner) -> Fits:
        """That of a runner's model."""
        shape = runner.cache_shape
        lasting = tuple(each for each in shape.layers if each.window is None)
        whole, reduced = (row_shape(shape, layers) for layers in (shape.layers, lasting))
        return cls(TYPES[shape.stored_dtype], whole, reduced, runner.vocabulary)

    def is_whole(self, shape: Sequence[int]) -> bool:
        """Whether a page with this shape, without its positions, has the rows of all layers. Raises ValueError."""
        if tuple(shape) not in (self.whole, self.reduced):
            raise ValueError("its rows have another shape")
        return tuple(shape) == self.whole


def row_shape(shape: CacheShape, layers: Sequence[LayerShape]) -> tuple[int, ...]:
    """The shape of these layers' rows in a page, without its positions (`outrider.verify.model.cache.paging.Rows.parts`)."""
    if shape.is_uniform:
        return len(layers), 2, shape.kv_heads, shape.stored_width(shape.head_dim)
    widths = (each.heads * (shape.stored_width(each.key_dim) + shape.stored_width(each.value_dim)) for each in layers)
    return 1, 1, 1, sum(widths)


def open_session(path: Path, fits: Fits, shared: dict[tuple[str, str], Page]) -> StoredSession:
    """The session in a file, with the pages in `shared` (by principal and digest), which receives the new ones.

    Raises one of UNREADABLE, KeyError, IndexError or ValueError.
    """
    with safe_open(path, "np") as file:
        labels, text = file.metadata() or {}, file.get_tensor(TEXT)
        digests = labels["pages"].split()
        slices = [file.get_slice(page_name(index)) for index in range(len(digests))]
        shapes = [each.get_shape() for each in slices]
        types = {each.get_dtype() for each in slices}
    lengths = [shape.pop(3) for shape in shapes]
    length, prompt_tokens, principal = sum(lengths), int(labels["prompt_tokens"]), labels["principal"]
    is_paged = all(size == PAGE_TOKENS for size in lengths[:-1]) and max(lengths) <= PAGE_TOKENS
    if text.ndim != 1 or text.dtype != np.int32 or not 0 < prompt_tokens <= len(text) or not length < len(text):
        raise ValueError("its parts do not fit together")
    if not is_paged or text_digest(text) != labels["text"]:
        raise ValueError("its text or its pages are damaged")
    found = [Page(is_whole=fits.is_whole(shape)) for shape in shapes]
    if types - {fits.type} or not ((text >= 0) & (text < fits.vocabulary)).all():
        raise ValueError("its rows or its tokens are not those of this model")
    pages = [shared.setdefault((principal, digest), page) for digest, page in zip(digests, found, strict=True)]
    rows = StoredRows(pages, length, [], path, digests, labels["states"].split())
    learned = {label.removeprefix(LEARNED): digest for label, digest in labels.items() if label.startswith(LEARNED)}
    return StoredSession(path, principal, labels.get("name"), prompt_tokens, text, rows, learned)


def page_name(index: int) -> str:
    """The name of a page's rows in a file."""
    return f"rows.{index}"


def state_names(index: int) -> tuple[str, str, str]:
    """The names of a snapshot's parts in a file."""
    return f"state.{index}.length", f"state.{index}.states", f"state.{index}.windows"


def state_digest(state: Snapshot) -> str:
    """A checksum of a snapshot; equal for equal ones only."""
    return f"{state.length}-{rows_digest(state.matrices)}-{rows_digest(state.windows)}"


def state_tensors(states: Sequence[Snapshot]) -> dict[str, torch.Tensor]:
    """What a file holds of the snapshots."""
    parts = [(torch.tensor(each.length), each.matrices, each.windows) for each in states]
    return {name: part for index, each in enumerate(parts) for name, part in zip(state_names(index), each, strict=True)}


def text_digest(text: Ints) -> str:
    """A checksum of a text, int32 [N]."""
    return hashlib.blake2b(np.ascontiguousarray(text).tobytes(), digest_size=16).hexdigest()


def rows_digest(rows: torch.Tensor) -> str:
    """A checksum of rows in host memory, and of their type and shape."""
    digest = new_digest(rows)
    digest.update(rows.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return str(digest.hexdigest())


def new_digest(rows: torch.Tensor) -> Any:
    """The beginning of the checksum of rows."""
    return hashlib.blake2b(f"{rows.dtype} {tuple(rows.shape)}\n".encode(), digest_size=16)


def arrays_digest(arrays: Mapping[str, NDArray[Any]]) -> str:
    """A checksum of a drafter's arrays and their names, types and shapes."""
    digest = hashlib.blake2b(digest_size=16)
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype} {array.shape}\n".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class Contents:
    """What is written to a session's file. The rows may be views of a slot, and are read while they are written."""

    principal: str
    name: str | None
    prompt_tokens: int
    text: Ints  # int32 [N]
    pages: Sequence[torch.Tensor]
    states: Sequence[Snapshot]
    learned: Mapping[str, Mapping[str, NDArray[Any]]]

    def labels(self, pages: Sequence[str]) -> dict[str, str]:
        """The labels, with the checksums of the pages."""
        labels = {"principal": self.principal, "prompt_tokens": str(self.prompt_tokens), "text": text_digest(self.text)}
        labels |= {"pages": " ".join(pages), "states": " ".join(map(state_digest, self.states))}
        labels |= {LEARNED + drafter: arrays_digest(arrays) for drafter, arrays in self.learned.items()}
        return labels if self.name is None else labels | {"name": self.name}

    def others(self) -> dict[str, torch.Tensor]:
        """All tensors but the pages."""
        arrays = {f"{drafter}:{key}": array for drafter, state in self.learned.items() for key, array in state.items()}
        found = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in {TEXT: self.text, **arrays}.items()}
        return found | state_tensors(self.states)


def contents_of(
    principal: str, name: str | None, verifier: TreeVerifier, learned: Mapping[DrafterName, Mapping[str, NDArray[Any]]]
) -> Contents:
    """What a session's file holds."""
    return Contents(
        principal,
        name,
        verifier.sequence.prompt_length,
        np.array(verifier.sequence.tokens, np.int32),
        list(verifier.rows.parts(verifier.committed_rows)),
        [each.to(torch.device("cpu")) for each in verifier.rows.states(verifier.committed_rows)[-SAVED_STATES:]],
        {drafter: {key: array.copy() for key, array in arrays.items()} for drafter, arrays in learned.items()},
    )


def write_session(file: BinaryIO, contents: Contents, stopped: Callable[[], bool]) -> bool:
    """Writes a session in safetensors' format, chunk by chunk; returns False if it was `stopped` before the end.

    The header comes first but has the checksums of what follows, so it is written once with others of the same length.
    """
    others = contents.others()
    pages = {page_name(index): rows for index, rows in enumerate(contents.pages)}
    layout = dict(sorted({**others, **pages}.items(), key=lambda each: -each[1].element_size()))  # so that all are aligned
    labels = contents.labels
    file.write(header(layout, labels([NO_DIGEST] * len(pages))))
    digests: list[str] = []
    for name, tensor in layout.items():
        digest = new_digest(tensor)
        data = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        for start in range(0, len(data), CHUNK_BYTES):
            if stopped():
                return False
            chunk = data[start : start + CHUNK_BYTES]
            file.write(chunk)
            if name in pages:
                digest.update(chunk)
        if name in pages:
            digests.append(digest.hexdigest())
    file.seek(0)
    file.write(header(layout, labels(digests)))
    return True


def header(layout: Mapping[str, torch.Tensor], labels: Mapping[str, str]) -> bytes:
    """The header of a file with these tensors one after the other."""
    entries: dict[str, Any] = {"__metadata__": labels}
    at = 0
    for name, tensor in layout.items():
        end = at + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
