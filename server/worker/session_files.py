"""Sessions on disk: their text, keys and values, and what their drafters have learned, one file each.

The format is safetensors, so a file holds no code. Files are readable by the owner only, and written under another name
first. Those of another model, dtype or version are in another folder. Promises that a damaged file costs one log line only.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from huggingface_hub import try_to_load_from_cache
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from drafters.interface import Ints
from drafters.options import DrafterName
from verify.checkpoint import DEFAULT_REVISION, GGUF, locate
from verify.model.cache.paging import PAGE_TOKENS, Page, SwappedRows
from verify.model.recurrent.states import Snapshot
from verify.model.runner import ModelRunner
from verify.verifier import TreeVerifier

log = logging.getLogger("outrider.worker")
SUFFIX = ".session"
TEXT = "text"
SAVED_STATES = 2  # of a session's recurrent layers: at its end, and before
LEARNED = "learned."  # begins the label of a drafter's arrays
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
        """As in `verify.model.cache.paging.Rows`. Raises DamagedSession."""
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


class SessionFiles:
    """The files of the sessions of one model, bounded in bytes; the least recently saved are removed first."""

    def __init__(self, folder: Path, model: str, max_bytes: int) -> None:
        """`model` identifies the weights, the dtype and the version."""
        self._folder = folder / model
        self._max_bytes = max_bytes

    def path_of(self, principal: str, name: str | None) -> Path:
        """The file of a session; a new one for a session without a name."""
        owner = hashlib.sha256(principal.encode("utf-8", "surrogateescape")).hexdigest()[:32]
        file = uuid.uuid4().hex if name is None else hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()[:32]
        return self._folder / owner / f"{file}{SUFFIX}"

    def save(
        self,
        path: Path,
        principal: str,
        name: str | None,
        verifier: TreeVerifier,
        learned: Mapping[DrafterName, Mapping[str, NDArray[Any]]],
    ) -> None:
        """Writes a session to its file; logs one line if that is not possible."""
        text = np.array(verifier.sequence.tokens, np.int32)
        pages = [part.cpu().contiguous() for part in verifier.rows.parts(verifier.committed_rows)]
        states = [each.to(torch.device("cpu")) for each in verifier.rows.states(verifier.committed_rows)[-SAVED_STATES:]]
        tensors = {TEXT: torch.from_numpy(text)} | {page_name(index): rows for index, rows in enumerate(pages)}
        labels = {"principal": principal, "prompt_tokens": str(verifier.sequence.prompt_length)}
        labels |= {"text": text_digest(text), "pages": " ".join(map(rows_digest, pages))}
        labels["states"] = " ".join(map(state_digest, states))
        tensors |= state_tensors(states)
        for drafter, state in learned.items():
            arrays = {key: np.ascontiguousarray(array) for key, array in state.items()}
            tensors |= {f"{drafter}:{key}": torch.from_numpy(array) for key, array in arrays.items()}
            labels[LEARNED + drafter] = arrays_digest(arrays)
        if name is not None:
            labels["name"] = name
        partial = path.with_suffix(f".{os.getpid()}.partial")
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            save_file(tensors, partial, labels)
            os.chmod(partial, 0o600)
            os.replace(partial, path)
        except (OSError, SafetensorError) as error:
            log.warning("a session could not be saved in %s: %s", self._folder, error)
            with contextlib.suppress(OSError):
                partial.unlink()
        self._trim()

    def remove(self, path: Path) -> None:
        """Removes a session's file; logs one line if that is not possible."""
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("a session's file could not be removed: %s", error)

    def load(self) -> Iterator[StoredSession]:
        """The stored sessions, least recently saved first. Rows are read when they are needed.

        A principal's sessions with equal pages share them.
        """
        shared: dict[tuple[str, str], Page] = {}
        for path in self._sizes():
            try:
                yield self._open(path, shared)
            except (*UNREADABLE, KeyError, IndexError, ValueError) as error:
                log.warning("%s is not a session of this model and is ignored: %s", path, error)

    def _open(self, path: Path, shared: dict[tuple[str, str], Page]) -> StoredSession:
        """The session in a file, with the pages in `shared` (by principal and digest), which receives the new ones."""
        with safe_open(path, "np") as file:
            labels, text = file.metadata() or {}, file.get_tensor(TEXT)
            digests = labels["pages"].split()
            shapes = [file.get_slice(page_name(index)).get_shape() for index in range(len(digests))]
        lengths = [shape.pop(3) for shape in shapes]
        length, prompt_tokens, principal = sum(lengths), int(labels["prompt_tokens"]), labels["principal"]
        is_paged = all(size == PAGE_TOKENS for size in lengths[:-1]) and max(lengths) <= PAGE_TOKENS
        if text.ndim != 1 or text.dtype != np.int32 or not 0 < prompt_tokens <= len(text) or not length < len(text):
            raise ValueError("its parts do not fit together")
        if not is_paged or text_digest(text) != labels["text"]:
            raise ValueError("its text or its pages are damaged")
        whole = [shape == shapes[-1] for shape in shapes]  # the last page is
        found = [Page(is_whole=each) for each in whole]
        pages = [shared.setdefault((principal, digest), page) for digest, page in zip(digests, found, strict=True)]
        rows = StoredRows(pages, length, [], path, digests, labels["states"].split())
        learned = {label.removeprefix(LEARNED): digest for label, digest in labels.items() if label.startswith(LEARNED)}
        return StoredSession(path, principal, labels.get("name"), prompt_tokens, text, rows, learned)

    def _sizes(self) -> dict[Path, int]:
        """The files with their sizes, least recently saved first."""
        found: dict[Path, os.stat_result] = {}
        with contextlib.suppress(OSError):
            for path in self._folder.glob(f"*/*{SUFFIX}"):
                with contextlib.suppress(OSError):  # another process has just removed it
                    found[path] = path.stat()
        return {path: found[path].st_size for path in sorted(found, key=lambda path: found[path].st_mtime_ns)}

    def _trim(self) -> None:
        sizes = self._sizes()
        total = sum(sizes.values())
        for path, size in sizes.items():
            if total > self._max_bytes:
                self.remove(path)
                total -= size


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
    """A checksum of rows in host memory; equal for equal rows only."""
    return hashlib.blake2b(rows.contiguous().view(torch.uint8).numpy().data, digest_size=16).hexdigest()


def arrays_digest(arrays: Mapping[str, NDArray[Any]]) -> str:
    """A checksum of a drafter's arrays and their names, types and shapes."""
    digest = hashlib.blake2b(digest_size=16)
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype} {array.shape}\n".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def model_digest(path: str, runner: ModelRunner, revision: str = DEFAULT_REVISION) -> str:
    """Identifies what determines a session's rows: the files of the weights, configuration, dtype, shapes and versions."""
    location = locate(path, revision)
    folder = Path(location.source)
    if not folder.is_dir():  # a hub id; the cache has a folder per commit
        known = location.gguf or "config.json"
        folder = Path(try_to_load_from_cache(location.source, known, revision=revision) or path).parent
    weights = sorted(file for file in folder.glob("*") if file.suffix in (".safetensors", GGUF))
    files = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in weights]
    shape = runner.cache_shape
    parts = [path, folder.name, files, runner.model.config.to_json_string(), str(shape.dtype), shape.device.type]
    parts += [shape.layers, runner.weight_bytes, version("outrider"), torch.__version__]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]
