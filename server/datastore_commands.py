"""The commands `outrider datastore ...`. Heavy imports happen inside them, to keep --help fast."""

from __future__ import annotations

import os
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.server.command import fail
from outrider.server.imports import hide_torch

if TYPE_CHECKING:
    from outrider.server.datastore_watch import Update

# A watch has this niceness, so that a server on the same machine comes first.
NICENESS = 5

app = typer.Typer(help="Build and inspect the tables that drafters read.", no_args_is_help=True)


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
    max_megabytes: Annotated[float | None, typer.Option(help="ngram: drop rare contexts until the file fits.")] = None,
    order: Annotated[int, typer.Option(min=2, max=4, help="ngram: n-gram order; 3 for tri-grams.")] = 3,
    append: Annotated[bool, typer.Option(help="suffix: append to an existing datastore.")] = False,
) -> None:
    """Build a table from a corpus. Run the command again to resume an interrupted suffix build."""
    from outrider import models

    hide_torch()  # tokenizers need none
    from outrider.server.datastore_builder import DatastoreError, build_ngram, build_suffix

    tokenizer = tokenizer or str(models.TARGET)
    try:
        if kind == "ngram":
            contexts = build_ngram(paths, out, tokenizer, successors, max_megabytes, order)
            print(f"{out}: {contexts} contexts, {out.stat().st_size / 1e6:.1f} MB")
        elif kind == "suffix":
            built = build_suffix(paths, out, tokenizer, append)
            print(f"{out}: {built.documents} documents, {built.tokens} tokens, {built.bytes / 1e6:.1f} MB")
        else:
            raise DatastoreError(f"There is no datastore kind {kind!r}; use ngram or suffix.")
    except DatastoreError as error:
        raise fail(str(error)) from None


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

    hide_torch()  # tokenizers need none
    from outrider.server.datastore_builder import DatastoreError
    from outrider.server.datastore_watch import Watcher, watch

    try:
        with closing(Watcher(directory, out, tokenizer or str(models.TARGET))) as watcher:
            print(f"{out}: indexing {directory}", flush=True)
            if once:
                print_update(watcher.update())
            else:
                os.nice(NICENESS)
                watch(watcher, interval, print_update)
    except DatastoreError as error:
        raise fail(str(error)) from None


def print_update(update: Update) -> None:
    """Prints an update as one line."""
    print(
        f"{time.strftime('%H:%M:%S')}  {update.changed} changed, {update.deleted} deleted: "
        f"{update.files} files, {update.tokens} tokens, {update.seconds:.2f} s",
        flush=True,
    )


@app.command("merge")
def datastore_merge(
    folders: Annotated[list[Path], typer.Argument(help="Suffix datastores built with the same tokenizer.")],
    out: Annotated[Path, typer.Option(help="Folder to write.")],
) -> None:
    """Merge several suffix datastores into one."""
    hide_torch()  # tokenizers need none
    from outrider.server.datastore_builder import DatastoreError, merge

    try:
        merged = merge(out, folders)
    except DatastoreError as error:
        raise fail(str(error)) from None
    print(f"{out}: {merged.documents} documents, {merged.tokens} tokens, {merged.bytes / 1e6:.1f} MB")


@app.command("info")
def datastore_info(path: Annotated[Path, typer.Argument(help="Suffix datastore or n-gram table.")]) -> None:
    """Describe a table."""
    hide_torch()  # tokenizers need none
    from outrider.server.datastore_builder import DatastoreError, describe

    try:
        for name, value in describe(path).items():
            print(f"{name}: {value}")
    except DatastoreError as error:
        raise fail(str(error)) from None
