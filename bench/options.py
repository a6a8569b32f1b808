"""Command-line options that several benchmarks share."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from outrider.server.command import fail

Config = Annotated[Path | None, typer.Option(help="YAML file of settings; configs/ has examples.")]
Prompts = Annotated[Path, typer.Option(help="A .jsonl or .jsonl.gz file; every line has a `prompt` field.")]
Drafters = Annotated[str, typer.Option(help="Drafter names, separated by commas.")]
Temperatures = Annotated[str, typer.Option(help="Temperatures, separated by commas.")]
Limit = Annotated[int | None, typer.Option(help="Use only the first LIMIT prompts.", min=1)]
MaxTokens = Annotated[int, typer.Option(help="Tokens per answer.", min=1)]
Repeats = Annotated[int, typer.Option(help="Measured rounds; one more warms up.", min=1)]
Out = Annotated[Path | None, typer.Option(help="Save the figures as JSON.")]


@contextmanager
def errors_as_sentences() -> Iterator[None]:
    """Ends the command with exit code 2 and one sentence if a benchmark cannot run; on SIGTERM, like on Ctrl-C, in order."""
    from bench.plan import BenchError
    from outrider.drafters.tables.array_file import ArrayFileError
    from outrider.server.settings import SettingsError
    from outrider.verify.errors import ModelError

    # So that servers that it started end, too.
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    except (SettingsError, BenchError, ModelError, ArrayFileError) as error:
        raise fail(str(error)) from None
    finally:
        signal.signal(signal.SIGTERM, previous)
