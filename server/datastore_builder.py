"""Builds the drafters' tables from text files: reads, tokenizes in blocks, counts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.progress import Progress
from transformers import PreTrainedTokenizerBase

from drafters.tables import array_file, datastore, ngram, suffix
from drafters.tables.array_file import ArrayFileError
from verify.errors import ModelError
from verify.tokenizer import fingerprint, load_tokenizer

BLOCK_TOKENS = 32_000_000  # sorting a block takes about 80 bytes per token
TEXT_SUFFIXES = {
    ".txt",
    ".md",
    ".py",
    ".rst",
    ".c",
    ".h",
    ".cpp",
    ".js",
    ".ts",
    ".go",
    ".rs",
    ".java",
    ".html",
    ".css",
    ".yaml",
    ".toml",
}


class DatastoreError(ValueError):
    """The datastore cannot be built; the message says why."""


def build_ngram(
    paths: Sequence[Path], out: Path, tokenizer: str, successors: int, max_megabytes: float | None, order: int = 3
) -> int:
    """Counts all texts below `paths` into an n-gram table; returns its number of contexts. Raises DatastoreError."""
    loaded = _tokenizer(tokenizer)
    separator = len(loaded)  # no token: texts are counted apart
    max_bytes = None if max_megabytes is None else int(max_megabytes * 1e6)
    with Progress() as progress:
        texts = read_all(find_files(paths), progress)
        blocks = token_blocks(texts, loaded)
        return ngram.build(out, blocks, fingerprint(loaded), separator, successors, max_bytes, order)


def build_suffix(paths: Sequence[Path], out: Path, tokenizer: str, append: bool) -> datastore.Description:
    """Indexes all texts below `paths` as a datastore of `retrieval`, or adds them to one. Raises DatastoreError."""
    loaded = _tokenizer(tokenizer)
    mark = fingerprint(loaded)
    if append:
        _check(out, mark)
    files = find_files(paths)
    plan = "\n".join([mark, str(append), *(f"{file} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files)])
    with Progress() as progress:
        blocks = token_blocks(read_all(files, progress), loaded)
        datastore.build(out, blocks, len(loaded), mark, plan, append)
    return datastore.describe(out)


def merge(out: Path, folders: Sequence[Path]) -> datastore.Description:
    """One datastore with all that `folders` hold. Raises DatastoreError."""
    try:
        datastore.merge(out, folders)
    except ArrayFileError as error:
        raise DatastoreError(str(error)) from None
    return datastore.describe(out)


def describe(path: Path) -> dict[str, object]:
    """What a datastore folder or an n-gram table holds. Raises DatastoreError."""
    try:
        if path.is_dir():
            return {"kind": suffix.KIND, **asdict(datastore.describe(path))}
        file = array_file.load(path, ngram.KIND)
    except ArrayFileError as error:
        raise DatastoreError(str(error)) from None
    contexts, successors = len(file.arrays["keys"]), len(file.arrays["tokens"])
    size, mark = path.stat().st_size, file.metadata["fingerprint"]
    return {"kind": ngram.KIND, "contexts": contexts, "successors": successors, "bytes": size, "fingerprint": mark}


def _tokenizer(path: str) -> PreTrainedTokenizerBase:
    try:
        return load_tokenizer(path)
    except ModelError as error:
        raise DatastoreError(str(error)) from None


def _check(folder: Path, mark: str) -> None:
    try:
        datastore.open_blocks(folder, mark)
    except ArrayFileError as error:
        raise DatastoreError(str(error)) from None


def read_all(files: Sequence[Path], progress: Progress) -> Iterator[str]:
    """All texts of all files, shown on a progress bar by the bytes read."""
    task = progress.add_task("reading", total=sum(file.stat().st_size for file in files))
    for file in files:
        yield from read_texts(file)
        progress.advance(task, file.stat().st_size)


def find_files(paths: Sequence[Path]) -> list[Path]:
    """The files that `paths` name, folders searched for text. Raises DatastoreError."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            found += sorted(p for p in path.rglob("*") if p.is_file() and p.suffix in TEXT_SUFFIXES | {".jsonl"})
        elif path.is_file():
            found.append(path)
        else:
            raise DatastoreError(f"There is no file or folder {path}.")
    if not found:
        raise DatastoreError("No text files there; give .txt, .py, .md or .jsonl files, or folders that hold some.")
    return found


def read_texts(file: Path) -> Iterator[str]:
    """The file's texts: one per line's field `text` for .jsonl, else the whole file. Raises DatastoreError."""
    if file.suffix != ".jsonl":
        yield file.read_text(encoding="utf-8", errors="replace")
        return
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                text = json.loads(line)["text"]
            except (ValueError, KeyError, TypeError):
                raise DatastoreError(f'{file} line {number} is not JSON with a field "text".') from None
            yield str(text)


def token_blocks(texts: Iterator[str], tokenizer: PreTrainedTokenizerBase) -> Iterator[NDArray[np.uint32]]:
    """The texts as token ids, before each the number of tokens as separator, in blocks of about BLOCK_TOKENS."""
    separator = len(tokenizer)
    parts: list[NDArray[np.uint32]] = []
    size = 0
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False, verbose=False)
        parts.append(np.array([separator, *ids], np.uint32))
        size += len(parts[-1])
        if size >= BLOCK_TOKENS:
            yield np.concatenate(parts)
            parts, size = [], 0
    if parts:
        yield np.concatenate(parts)
