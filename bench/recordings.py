"""Recorded answers of other models, the corpus to index before their replay, and the tokenizers of both."""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray

from bench.plan import BenchError
from outrider.drafters.interface import Ints
from outrider.drafters.options import Options
from outrider.drafters.registry import Resources
from outrider.drafters.tables import base_table, suffix
from outrider.server.datastore_builder import DatastoreError, find_files, read_texts
from outrider.verify.errors import ModelError
from outrider.verify.tokenizer import load_tokenizer


class Encoder(Protocol):
    """The part of a tokenizer that benchmarks use."""

    def encode(self, text: str) -> list[int]: ...

    def __len__(self) -> int: ...


@dataclass(frozen=True)
class Line:
    """A prompt and its recorded answer."""

    prompt: Ints  # int32 [P]
    answer: Ints  # int32 [A]


def load_encoder(path: str) -> Encoder:
    """A sentencepiece .model file, or a tokenizer folder or Hugging Face id. Raises BenchError."""
    if path.endswith(".model"):
        import sentencepiece

        try:
            return cast(Encoder, sentencepiece.SentencePieceProcessor(model_file=path))
        except (OSError, RuntimeError):  # which of them depends on the version
            raise BenchError(f"{path} is not a sentencepiece model.") from None
    try:
        return cast(Encoder, load_tokenizer(path))
    except ModelError as error:
        raise BenchError(str(error)) from None


def load_stream(path: Path, encoder: Encoder, limit: int | None) -> list[Line]:
    """The lines of a stream. Raises BenchError."""
    lines: list[Line] = []
    try:
        for text in path.read_text().splitlines()[:limit]:
            record = json.loads(text)
            prompt, answer = (np.array(encoder.encode(record[name]), np.int32) for name in ("prompt", "response"))
            lines.append(Line(prompt, answer))
    except (OSError, ValueError, KeyError) as error:
        raise BenchError(f"Cannot read {path} ({error}); give .jsonl lines with `prompt` and `response`.") from None
    return lines


def load_resources(corpus: Sequence[Path], encoder: Encoder, options: Options) -> Resources:
    """The corpus as n-gram table and suffix index for the drafters; empty tables for an empty corpus. Raises BenchError.

    Each text is preceded by the separator `len(encoder)`.
    """
    separator, parts = len(encoder), list[NDArray[np.uint32]]()
    try:
        for file in find_files(corpus) if corpus else ():
            parts += [np.array([separator, *encoder.encode(text)], np.uint32) for text in read_texts(file)]
    except DatastoreError as error:
        raise BenchError(str(error)) from None
    if not parts:
        return Resources(options, vocabulary=separator + 1)
    tokens = np.concatenate(parts)
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "table"
        base_table.build(table, [tokens], "replay", separator)
        base = base_table.load(table)
        return Resources(options, base, [suffix.index(tokens, separator)], separator + 1)
