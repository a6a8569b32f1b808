"""The commands `outrider datastore ...`. Heavy imports happen inside them, to keep --help fast."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.server.command import failing
from outrider.server.imports import hide_torch

if TYPE_CHECKING:
    from outrider.server.datastore_watch import Update

# A watch has this niceness, so that a server on the same machine comes first.
NICENESS = 5

app = typer.Typer(help="Build and inspect the tables that drafters read.", no_args_is_help=True)


@contextmanager
def errors_as_sentences() -> Iterator[None]:
    """Ends a command with the sentence of an error. The command imports no torch, which tokenizers do not need."""
    hide_torch()
    from outrider.drafters.tables.array_file import ArrayFileError
    from outrider.verify.errors import ModelError

    with failing(ArrayFileError, ModelError):
        yield


def register(outrider: typer.Typer) -> None:
    """Adds the commands to the `outrider` application."""
    outrider.add_typer(app, name="datastore")


@app.command("build")
def datastore_build(
    paths: Annotated[
        list[Path], typer.Argument(help="Text files (.txt, .py, .md ...), .jsonl files (field `text`), or folders.")
    ],
    out: Annotated[Path, typer.Option(help="File (ngram) or folder (suffix) to write.")],
    tokenizer: Annotated[str, typer.Option(help="Folder or Hugging Face id; defaults to the embedded model's.")] = "",
    kind: Annotated[str, typer.Option(help="ngram: base table of `trigram`; suffix: index of `retrieval`.")] = "ngram",
    successors: Annotated[int, typer.Option(min=1, max=64, help="ngram: successors per context.")] = 12,
) -> None:
    """Build a table from a corpus."""
    from outrider import models

    tokenizer = tokenizer or str(models.TARGET)
    with errors_as_sentences():
        from outrider.server.datastore_builder import DatastoreError, build_ngram, build_suffix

        if kind == "ngram":
            contexts = build_ngram(paths, out, tokenizer, successors)
            print(f"{out}: {contexts} contexts, {out.stat().st_size / 1e6:.1f} MB")
        elif kind == "suffix":
            built = build_suffix(paths, out, tokenizer)
            print(f"{out}: {built.documents} documents, {built.tokens} tokens, {built.bytes / 1e6:.1f} MB")
        else:
            raise DatastoreError(f"There is no datastore kind {kind!r}; use ngram or suffix.")


@app.command("watch")
def datastore_watch(
    directory: Annotated[Path, typer.Argument(help="Working tree; git tells which files are ignored.")],
    out: Annotated[Path, typer.Option(help="Folder of the suffix datastore; continued if it exists.")],
    tokenizer: Annotated[str, typer.Option(help="Folder or Hugging Face id; defaults to the embedded model's.")] = "",
    interval: Annotated[float, typer.Option(min=0.1, max=3600, help="Seconds between two checks of the files.")] = 0.5,
    once: Annotated[bool, typer.Option("--once", help="Build or update the datastore, then exit.")] = False,
) -> None:
    """Keep a suffix datastore up to date with a working tree until Ctrl-C. Running servers load its updates."""
    from outrider import models

    with errors_as_sentences():
        from outrider.server.datastore_watch import Watcher, watch

        with closing(Watcher(directory, out, tokenizer or str(models.TARGET))) as watcher:
            print(f"{out}: indexing {directory}", flush=True)
            if once:
                print_update(watcher.update())
            else:
                os.nice(NICENESS)
                watch(watcher, interval, print_update)


def print_update(update: Update) -> None:
    print(
        f"{time.strftime('%H:%M:%S')}  {update.changed} changed, {update.deleted} deleted: "
        f"{update.files} files, {update.tokens} tokens, {update.seconds:.2f} s",
        flush=True,
    )


@app.command("info")
def datastore_info(path: Annotated[Path, typer.Argument(help="Suffix datastore or n-gram table.")]) -> None:
    """Describe a table."""
    with errors_as_sentences():
        from outrider.server.datastore_builder import describe

        for name, value in describe(path).items():
            print(f"{name}: {value}")
