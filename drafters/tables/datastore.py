"""Datastores of `retrieval` on disk: a folder of blocks, each a corpus block with its index in an array file.

Blocks are searched together, so building, appending and merging are all the adding of blocks, in bounded memory.
A folder appears under its name only when it is complete.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drafters.tables import array_file
from drafters.tables.array_file import ArrayFile, ArrayFileError
from drafters.tables.pages import open_pages
from drafters.tables.suffix import KIND, NONE, ROW, Corpus, corpus_of, tabulate

PLAN = "plan.txt"  # in a folder that is being built: what it is built from


@dataclass(frozen=True)
class Description:
    """What `outrider datastore info` prints of a datastore."""

    blocks: int
    documents: int
    tokens: int
    bytes: int
    fingerprint: str


def block_paths(folder: Path) -> list[Path]:
    """The blocks of a datastore in order. Raises ArrayFileError where it is none."""
    found = sorted(folder.glob("*.block"))
    if not found:
        raise ArrayFileError(f"{folder} is not a datastore folder; build one with `outrider datastore build --kind suffix`.")
    return found


def load(folder: Path, fingerprint: str | None = None) -> list[Corpus]:
    """Opens all blocks of a datastore; raises ArrayFileError where one is unusable or made with another tokenizer."""
    blocks = []
    for file in open_blocks(folder, fingerprint):
        places = {name: start // 4 for name, start in file.starts.items()}
        blocks.append(corpus_of(open_pages(file.path), places, file.arrays, int(file.metadata["separator"])))
    return blocks


def open_blocks(folder: Path, fingerprint: str | None = None) -> list[ArrayFile]:
    """The files of all blocks, their arrays mapped and seen to be whole; raises ArrayFileError as `load` does."""
    files = [array_file.load(path, KIND, fingerprint) for path in block_paths(folder)]
    for file in files:
        try:
            whole = _whole(file.arrays, int(file.metadata["separator"]))
        except (KeyError, ValueError, IndexError):
            raise ArrayFileError(f"{file.path} lacks parts of a block; build the datastore again.") from None
        if not whole or any(start % 4 for start in file.starts.values()):
            raise ArrayFileError(f"{file.path} is damaged; build the datastore again.")
    return files


def _whole(arrays: Mapping[str, NDArray[Any]], separator: int) -> bool:
    """The arrays agree with each other: the kernels that read them check no bounds."""
    order, first, slots, rows = (arrays[name] for name in ("order", "first", "slots", "rows"))
    used = slots[slots[:, 1] != NONE, 1]
    return (
        all(array.dtype == np.uint32 for array in (order, first, slots, rows))
        and arrays["tokens"].dtype in (np.uint16, np.uint32)
        and len(order) == len(arrays["tokens"]) == first[-1]
        and first.shape == (separator + 2,)
        and not np.any(first[1:] < first[:-1])
        and slots.shape[1] == 2
        and len(slots) & (len(slots) - 1) == 0 < len(slots)
        and rows.shape[1] == ROW
        and bool(np.all(used >> 3 < len(rows)))
    )


def describe(folder: Path) -> Description:
    """Counts what the datastore holds; raises ArrayFileError."""
    files = open_blocks(folder)
    documents = sum(int((file.arrays["tokens"] == int(file.metadata["separator"])).sum()) for file in files)
    tokens = sum(len(file.arrays["tokens"]) for file in files) - documents
    size = sum(file.path.stat().st_size for file in files)
    return Description(len(files), documents, tokens, size, files[0].metadata["fingerprint"])


def save_block(path: Path, tokens: NDArray[Any], separator: int, fingerprint: str) -> None:
    """Sorts a block of text (any integer [T], `separator` before each document) and writes it."""
    array_file.save(path, KIND, fingerprint, tabulate(tokens, separator), separator=str(separator))


def build(out: Path, blocks: Iterable[NDArray[Any]], separator: int, fingerprint: str, plan: str, append: bool = False) -> None:
    """Writes `blocks` as the datastore `out`, or adds them to it.

    `plan` names the texts that the blocks come from. An interrupted build leaves `out`.partial; the next call with the
    same plan goes on there: a block that is complete is not sorted again.
    """
    partial = _start(out, plan)
    first = 0
    if append:
        for path in block_paths(out):
            link(path, partial / path.name)
            first += 1
    for number, tokens in enumerate(blocks, start=first):
        path = partial / f"{number:06d}.block"
        if not path.exists():
            save_block(path, tokens, separator, fingerprint)
    publish(partial, out)


def merge(out: Path, folders: Sequence[Path]) -> None:
    """Writes the datastore `out` with the blocks of all `folders`; raises ArrayFileError where tokenizers differ."""
    fingerprint = array_file.load(block_paths(folders[0])[0], KIND).metadata["fingerprint"]
    partial = _start(out, "merge")
    number = 0
    for folder in folders:
        open_blocks(folder, fingerprint)
        for path in block_paths(folder):
            link(path, partial / f"{number:06d}.block")
            number += 1
    publish(partial, out)


def _start(out: Path, plan: str) -> Path:
    """The folder to build in: that of an interrupted build with the same plan, else an empty one."""
    partial = out.with_name(out.name + ".partial")
    old = out.with_name(out.name + ".old")
    if old.exists() and not out.exists():  # an earlier publish was interrupted between its two renames
        os.replace(old, out)
    note = partial / PLAN
    if partial.exists() and (not note.exists() or note.read_text() != plan):
        shutil.rmtree(partial)
    partial.mkdir(parents=True, exist_ok=True)
    note.write_text(plan)
    return partial


def link(source: Path, target: Path) -> None:
    """Makes `target` the same file as `source`, or a copy where the file system cannot."""
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def publish(partial: Path, out: Path) -> None:
    """Gives a complete folder its name, in place of an older one."""
    for leftover in [*partial.glob("*.partial"), partial / PLAN]:
        leftover.unlink()
    old = out.with_name(out.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if out.exists():
        os.replace(out, old)
    os.replace(partial, out)
    shutil.rmtree(old, ignore_errors=True)
