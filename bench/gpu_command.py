"""The command `outrider bench gpu`, also `python -m bench.gpu`. Heavy imports happen inside it, to keep --help fast."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bench.options import errors_as_sentences


def bench_gpu(
    out: Annotated[Path, typer.Option(help="Save the figures as JSON.")] = Path("outrider-gpu.json"),
    only: Annotated[str, typer.Option(help="Parts to measure, separated by commas; all by default.")] = "",
) -> None:
    """Check and measure everything that needs a GPU, in minutes. Exit code 2 without one."""
    with errors_as_sentences():
        from bench import gpu

        gpu.check_device()
        gpu.run(gpu.chosen_parts(only), out)
