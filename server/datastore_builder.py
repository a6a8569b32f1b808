"""Builds the drafters' tables from text files: reads the files, tokenizes them in blocks, counts or indexes the tokens."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.progress import Progress

from outrider.drafters.tables import array_file, base_table, datastore, suffix
from outrider.drafters.tables.array_file import ArrayFileError
from outrider.server.batches import batches
from outrider.verify.fast_tokenizer import AnyTokenizer
from outrider.verify.tokenizer import fingerprint, load_tokenizer

# Sorting a block takes about 80 bytes per token.
BLOCK_TOKENS = 32_000_000
TEXT_SUFFIXES = {
    *(".txt", ".md", ".rst", ".html", ".css", ".yaml", ".toml", ".jsonl"),
    *(".py", ".c", ".h", ".cpp", ".js", ".ts", ".go", ".rs", ".java"),
}


class DatastoreError(ArrayFileError):
    """The texts of a datastore cannot be read. The message is one sentence that says why."""


def build_ngram(paths: Sequence[Path], out: Path, tokenizer: str, successors: int) -> int:
    """Counts the texts in `paths` into an n-gram table; returns its contexts' number. Raises ArrayFileError and ModelError."""
    array_file.check_out(out, base_table.KIND)
    loaded = load_tokenizer(tokenizer)
    separator = len(loaded)  # it is no token id, so no n-gram spans two texts
    with Progress() as progress:
        blocks = token_blocks(read_all(find_files(paths), progress), loaded)
        return base_table.build(out, blocks, fingerprint(loaded), separator, successors)


def build_suffix(paths: Sequence[Path], out: Path, tokenizer: str) -> datastore.Description:
    """Indexes the texts in `paths` as a suffix datastore. Raises ArrayFileError and ModelError."""
    datastore.check_out(out)
    loaded = load_tokenizer(tokenizer)
    with Progress() as progress:
        blocks = token_blocks(read_all(find_files(paths), progress), loaded)
        datastore.build(out, blocks, len(loaded), fingerprint(loaded))
    return datastore.describe(out)


def describe(path: Path) -> dict[str, object]:
    """The properties of a suffix datastore or an n-gram table, by name. Raises ArrayFileError."""
    if path.is_dir():
        return {"kind": suffix.KIND, **asdict(datastore.describe(path))}
    file = array_file.load(path, base_table.KIND)
    return {
        "kind": base_table.KIND,
        "contexts": len(file.arrays["keys"]),
        "successors": len(file.arrays["tokens"]),
        "bytes": path.stat().st_size,
        "fingerprint": file.metadata["fingerprint"],
    }


def read_all(files: Sequence[Path], progress: Progress) -> Iterator[str]:
    """The texts of all files in order; `progress` counts the bytes read."""
    task = progress.add_task("reading", total=sum(file.stat().st_size for file in files))
    for file in files:
        yield from read_texts(file)
        progress.advance(task, file.stat().st_size)


def find_files(paths: Sequence[Path]) -> list[Path]:
    """The files in `paths`; folders are searched for text files. Raises DatastoreError."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            found += sorted(p for p in path.rglob("*") if p.is_file() and p.suffix in TEXT_SUFFIXES)
        elif path.is_file():
            found.append(path)
        else:
            raise DatastoreError(f"There is no file or folder {path}.")
    if not found:
        raise DatastoreError("No text files found; give .txt, .py, .md or .jsonl files, or folders that contain some.")
    return found


def read_texts(file: Path) -> Iterator[str]:
    """The file's texts: the field `text` of each line of a .jsonl file, otherwise the whole file. Raises DatastoreError."""
    if file.suffix != ".jsonl":
        yield file.read_text(encoding="utf-8", errors="replace")
        return
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                text = json.loads(line)["text"]
            except (ValueError, KeyError, TypeError):
                raise DatastoreError(f'{file} line {number} is not a JSON object with a field "text".') from None
            yield str(text)


def token_blocks(texts: Iterator[str], tokenizer: AnyTokenizer) -> Iterator[NDArray[np.uint32]]:
    """The texts' token ids, uint32, in blocks of about BLOCK_TOKENS. The vocabulary size precedes each text as a separator."""
    ids = (tokenizer.encode(text, add_special_tokens=False, verbose=False) for text in texts)
    parts = (np.array([len(tokenizer), *each], np.uint32) for each in ids)
    return map(np.concatenate, batches(parts, len, BLOCK_TOKENS))
