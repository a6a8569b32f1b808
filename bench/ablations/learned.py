"""`python -m bench.ablations.learned`: what earlier sessions of a key bring (`sessions.learn: key`), on recorded answers.

The last half of each stream is replayed twice, each line as a new session: alone, and after the first half was learned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from bench import report
from bench.ablations.decoding import NODES
from bench.options import Limit, Out, StreamTokenizer
from bench.recordings import Line, load_encoder, load_resources, load_stream
from bench.replay import Tally, replay
from outrider.drafters.options import Options
from outrider.drafters.registry import Resources, make
from outrider.server.settings import Settings
from outrider.server.worker.learned import LearnedText
from outrider.server.worker.resources import Stores


def tokens_per_step(resources: Resources, lines: Sequence[Line]) -> float:
    """Of `fusion`, which begins every line as a new session."""
    tally = Tally()
    for line in lines:
        replay(make("fusion", resources), line, NODES, tally)
    return round(tally.tokens_per_step, 4)


def compare(lines: Sequence[Line], resources: Resources, max_tokens: int) -> dict[str, float]:
    """The figures of the last half of the lines."""
    middle = len(lines) // 2
    text = LearnedText(max_tokens, resources.vocabulary)
    for number, line in enumerate(lines[:middle]):
        text.add(number, np.concatenate([line.prompt, line.answer]))
    learning = replace(resources, corpus=(*resources.corpus, *Stores([text])))
    alone, learned = (tokens_per_step(each, lines[middle:]) for each in (resources, learning))
    return {"alone": alone, "learned": learned, "gain": round(learned / alone - 1, 4)}


def main(
    stream: Annotated[list[Path], typer.Option(help="A .jsonl file with `prompt` and `response`; repeatable.")],
    tokenizer: StreamTokenizer,
    corpus: Annotated[list[Path], typer.Option(help="Texts to index as a datastore; repeatable.")],
    limit: Limit = None,
    out: Out = None,
) -> None:
    """Compare sessions that learn only from themselves with sessions that also learn from earlier ones."""
    encoder, max_tokens = load_encoder(tokenizer), Settings().sessions.learned_tokens
    rows: list[dict[str, Any]] = []
    for paths in (corpus, []):
        resources = load_resources(paths, encoder, Options())
        for path in stream:
            figures = compare(load_stream(path, encoder, limit)[0], resources, max_tokens)
            rows.append({"stream": path.stem, "datastore": bool(paths), **figures})
    columns = ("stream", "datastore", "alone", "learned", "gain")
    report.print_table("Tokens per step of fusion, 64 nodes", columns, [tuple(row.values()) for row in rows])
    if out:
        report.save(out, {"tokenizer": Path(tokenizer).name, "learned_tokens": max_tokens, "results": rows})


if __name__ == "__main__":
    typer.run(main)
