"""Datastores of the `retrieval` drafter on disk: folders of blocks, each a corpus block and its index in an array file.

All blocks of a datastore are searched, so it is built in bounded memory. A folder is renamed to its final name once it is
complete. A folder that is updated in place has a manifest that names its current blocks: it is replaced in one step, and a
block's name is never used again, so a reader sees either the old or the new blocks.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.drafters.tables import array_file
from outrider.drafters.tables.array_file import ArrayFile, ArrayFileError
from outrider.drafters.tables.pages import open_pages
from outrider.drafters.tables.suffix import KIND, NONE, ROW, Corpus, corpus_of, tabulate

# This file is in a folder that is updated in place.
MANIFEST = "manifest.json"
# A version is the file's device, inode and modification time.
Version = tuple[int, int, int]


BLOCK = ".block"  # the suffix of the files


@dataclass(frozen=True)
class Description:
    """A datastore's contents, as `outrider datastore info` prints them."""

    blocks: int
    documents: int
    tokens: int
    bytes: int
    fingerprint: str


def block_paths(folder: Path) -> list[Path]:
    """The block files of a datastore in order. Raises ArrayFileError if `folder` is not a datastore."""
    try:
        manifest = (folder / MANIFEST).read_bytes()
    except OSError:
        found = sorted(folder.glob(f"*{BLOCK}"))
    else:
        found = [folder / name for name in _block_names(folder, manifest)]
    if not found:
        raise ArrayFileError(f"{folder} is not a datastore folder; build one with `outrider datastore build --kind suffix`.")
    return found


def _block_names(folder: Path, manifest: bytes) -> list[str]:
    try:
        names = json.loads(manifest)["blocks"]
        if all(Path(name).name == name for name in names):
            return list(names)
    except (KeyError, TypeError, ValueError, RecursionError):
        pass
    raise ArrayFileError(f"{folder / MANIFEST} is damaged; delete {folder} and build the datastore again.")


def write_manifest(folder: Path, blocks: Sequence[str]) -> None:
    """Makes the files with these names in `folder` the datastore's blocks."""
    partial = folder / (MANIFEST + ".partial")
    partial.write_text(json.dumps({"blocks": list(blocks)}))
    os.replace(partial, folder / MANIFEST)


def version(folder: Path) -> Version | None:
    """Changes whenever the datastore's blocks do. None if there is no such folder."""
    for path in (folder / MANIFEST, folder):
        try:
            found = path.stat()
        except OSError:
            continue
        return found.st_dev, found.st_ino, found.st_mtime_ns
    return None


def load(folder: Path, fingerprint: str | None = None, vocabulary: int | None = None) -> list[Corpus]:
    """Opens all blocks of a datastore. Raises ArrayFileError if one is unusable or was built with another tokenizer.

    Also refuses blocks with token ids that are not below `vocabulary` (None = any).
    """
    return [load_block(path, fingerprint, vocabulary) for path in block_paths(folder)]


def load_block(path: Path, fingerprint: str | None = None, vocabulary: int | None = None) -> Corpus:
    """Opens one block, as `load` does. Raises ArrayFileError."""
    file = open_block(path, fingerprint)
    separator, first = int(file.metadata["separator"]), file.arrays["first"]
    if vocabulary is not None and first[min(vocabulary, separator)] < first[separator]:
        raise ArrayFileError(f"{path} has token ids that this model lacks; build it again with this model's tokenizer.")
    word_offsets = {name: offset // 4 for name, offset in file.byte_offsets.items()}
    return corpus_of(open_pages(path), word_offsets, file.arrays, separator)


def open_blocks(folder: Path, fingerprint: str | None = None) -> list[ArrayFile]:
    """Maps the files of all blocks and checks their arrays. Raises ArrayFileError as `load` does."""
    return [open_block(path, fingerprint) for path in block_paths(folder)]


def open_block(path: Path, fingerprint: str | None = None) -> ArrayFile:
    """Maps the file of one block and checks its arrays. Raises ArrayFileError as `load` does."""
    file = array_file.load(path, KIND, fingerprint)
    try:
        consistent = _consistent(file.arrays, int(file.metadata["separator"]))
    except (KeyError, ValueError, IndexError):
        raise ArrayFileError(f"{path} lacks arrays of a block; build the datastore again.") from None
    if not consistent or any(offset % 4 for offset in file.byte_offsets.values()):
        raise ArrayFileError(f"{path} is damaged; build the datastore again.")
    return file


def _consistent(arrays: Mapping[str, NDArray[Any]], separator: int) -> bool:
    """Whether the arrays' types, shapes and references match; the library that reads them checks no bounds."""
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
    """Counts a datastore's documents, tokens and bytes. Raises ArrayFileError."""
    files = open_blocks(folder)
    documents = sum(int((file.arrays["tokens"] == int(file.metadata["separator"])).sum()) for file in files)
    tokens = sum(len(file.arrays["tokens"]) for file in files) - documents
    size = sum(file.path.stat().st_size for file in files)
    return Description(len(files), documents, tokens, size, files[0].metadata["fingerprint"])


def save_block(
    path: Path, tokens: NDArray[Any], separator: int, fingerprint: str, order: NDArray[np.uint32] | None = None
) -> None:
    """Indexes a block of text (any integer [T], a `separator` between documents) and writes it to `path`.

    `order` is the text's suffix array, if it is known.
    """
    array_file.save(path, KIND, fingerprint, tabulate(tokens, separator, order), separator=str(separator))


def build(out: Path, blocks: Iterable[NDArray[Any]], separator: int, fingerprint: str) -> None:
    """Writes `blocks` as the datastore `out`, in place of an earlier one once it is complete. Raises ArrayFileError."""
    check_out(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.", suffix=".partial") as folder:
            (partial := Path(folder) / "new").mkdir()
            for number, tokens in enumerate(blocks):
                save_block(partial / f"{number:06d}{BLOCK}", tokens, separator, fingerprint)
            if out.exists():
                os.replace(out, Path(folder) / "old")
            os.replace(partial, out)
    except OSError as error:
        raise ArrayFileError(f"{out} cannot be written: {error}.") from None


def check_out(out: Path) -> None:
    """Raises ArrayFileError unless a datastore may be written to `out`: only an earlier one is replaced, or an empty folder."""
    is_folder = out.is_dir() and not out.is_symlink()
    if os.path.lexists(out) and not (is_folder and all(file.suffix == BLOCK for file in out.iterdir())):
        raise ArrayFileError(f"{out} exists and is no datastore that was built here; give a new folder.")
