"""The command `outrider bench live`. Heavy imports happen inside it, to keep --help fast."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bench.options import Config, Drafters, MaxTokens, Out, Temperatures, errors_as_sentences


def bench_live(
    context: typer.Context,
    prompts: Annotated[Path, typer.Option(help="Spec-Bench's question.jsonl.")],
    questions: Annotated[int, typer.Option(help="Measured questions of each task; one more warms up.", min=1)] = 10,
    drafter: Drafters = "none,fusion",
    temperature: Temperatures = "0,0.8",
    max_tokens: MaxTokens = 128,
    peers: Annotated[str, typer.Option(help="Other programs, separated by commas; empty for none.")] = "transformers",
    only: Annotated[str, typer.Option(help="Tasks, separated by commas; default: all. --out keeps the others.")] = "",
    gguf: Annotated[
        Path | None, typer.Option(help="llama.cpp's file; default: the model's own, or one converted from it.")
    ] = None,
    config: Config = None,
    out: Out = None,
) -> None:
    """Measure a live model and other programs on the tasks of Spec-Bench. Settings also work as flags."""
    from bench.plan import parse_drafters, parse_numbers

    with errors_as_sentences():
        drafters, temperatures = parse_drafters(drafter), parse_numbers("--temperature", temperature)
        from bench.live.run import PEERS, run
        from bench.live.setup import Choice
        from bench.live.turns import parse_peers

        chosen = parse_peers(peers, list(PEERS))
        choice = Choice(prompts, questions, drafters, temperatures, max_tokens, chosen, only, gguf)
        run(config, context.args, choice, out)
