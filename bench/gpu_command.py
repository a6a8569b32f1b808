"""The command `outrider bench gpu`, also `python -m bench.gpu`. Heavy imports happen inside it, to keep --help fast."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bench.options import errors_as_sentences

OUT, SHARED = Path(__file__).parent / "results" / "gpu.json", Path("outrider-gpu.json")


def bench_gpu(
    share: Annotated[
        bool, typer.Option("--share", help="Also draw the main figures, as outrider-gpu.png beside outrider-gpu.json.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Save the figures as JSON; default: bench/results/gpu.json, or outrider-gpu.json.")
    ] = None,
    stream: Annotated[Path | None, typer.Option(help="Recorded answers of a model of this shape, for forced replay.")] = None,
    tokenizer: Annotated[str, typer.Option(help="The tokenizer of the recorded answers.")] = "",
    corpus: Annotated[Path | None, typer.Option(help="Texts to index before the replay.")] = None,
    limit: Annotated[int, typer.Option(help="Lines to replay.")] = 6,
    only: Annotated[str, typer.Option(help="Parts to measure, separated by commas; all by default.")] = "",
) -> None:
    """Check and measure everything that needs a GPU, in minutes. Exit code 2 without one.

    With --share, the two files that it writes hold all there is to report: figures, machine, versions and commit.
    """
    with errors_as_sentences():
        from bench import gpu
        from bench import share as sharing

        gpu.check_device()
        if share:
            sharing.check_pillow()
        result = out or (SHARED if share else OUT)
        gpu.run(gpu.chosen_parts(only, stream, tokenizer, corpus, limit), result)
        if share:
            print(f"Share {result} and {sharing.share(result)}.")


if __name__ == "__main__":
    typer.run(bench_gpu)
