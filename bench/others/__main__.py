"""Replays recorded answers with the drafts of other programs, and with Outrider's drafters, at the same node budgets.

Each answer is a new session. With a corpus, `retrieval` and `fusion` index it, and the suffix cache holds its documents as
earlier responses. A program that is not installed is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray
from rich.progress import track

from bench import report
from bench.options import Corpus, Limit, Out, StreamTokenizer, errors_as_sentences
from bench.others.drafters import SuffixCache, llama_lookup, suffix_cache, transformers_lookup
from bench.plan import parse_counts
from bench.recordings import Line, index_tokens, load_corpus, load_encoder, load_stream
from bench.replay import Tally, replay
from bench.turns import install_command
from outrider.drafters.interface import Drafter
from outrider.drafters.options import DrafterName, Options
from outrider.drafters.registry import make, warm

DRAFTERS: tuple[DrafterName, ...] = ("lookup", "retrieval", "fusion")
ARCTIC = {"arctic_inference": "arctic-inference"}
LLAMA = {"llama_cpp": "llama-cpp-python"}
# Tokens of a suffix cache's draft per matched token: its default, and one with which a short match fills the budget.
FACTORS = (1.0, 8.0)

Makers = Mapping[str, Callable[[], Drafter]]  # what makes a drafter for one answer, by name


def main(
    stream: Annotated[list[Path], typer.Option(help="A .jsonl file with `prompt` and `response`; repeatable.")],
    tokenizer: StreamTokenizer,
    corpus: Corpus = None,
    nodes: Annotated[str, typer.Option(help="Node budgets, separated by commas.")] = "24,64",
    limit: Limit = None,
    out: Out = None,
) -> None:
    """Compare the drafts of other programs with Outrider's."""
    for packages in (ARCTIC, LLAMA):
        if command := install_command(packages):
            print(f"{', '.join(packages.values())} is left out; install it with: {command}")
    with errors_as_sentences():
        encoder, budgets = load_encoder(tokenizer), parse_counts("--nodes", nodes)
        streams = {path.stem: load_stream(path, encoder, limit)[0] for path in stream}
        texts = {"none": np.empty(0, np.uint32)}
        if corpus:
            texts[", ".join(path.name for path in corpus)] = load_corpus(corpus, encoder)
    rows = [
        {"stream": name, "corpus": known, **row}
        for known, tokens in texts.items()
        for makers in [contenders(tokens, len(encoder))]
        for name, lines in streams.items()
        for row in compared(makers, lines, budgets, f"{name}, corpus: {known}")
    ]
    if out:
        report.save(out, {"tokenizer": Path(tokenizer).name, "results": rows})


def contenders(tokens: NDArray[np.uint32], separator: int) -> Makers:
    """All drafters that are installed. Those that use a corpus know one whose texts begin with `separator`."""
    resources = index_tokens(tokens, separator, Options())
    warm(resources)
    makers: dict[str, Callable[[], Drafter]] = {name: partial(make, name, resources) for name in DRAFTERS}
    if not len(tokens):
        makers["transformers: prompt lookup"] = transformers_lookup
        if not install_command(LLAMA):
            makers["llama-cpp-python: prompt lookup"] = llama_lookup
    if not install_command(ARCTIC):
        documents = np.split(tokens, np.flatnonzero(tokens == separator)[1:]) if len(tokens) else []
        cache = suffix_cache([document[1:].astype(np.int32) for document in documents])
        for factor in FACTORS:
            for shape in ("chain", "tree"):
                name = f"arctic-inference: suffix cache, {shape}, factor {factor:g}"
                makers[name] = partial(SuffixCache, cache, factor, shape == "tree")
    return makers


def compared(makers: Makers, lines: Sequence[Line], budgets: Sequence[int], title: str) -> list[dict[str, Any]]:
    """Tokens per step of each drafter at each node budget; prints them."""
    rows: list[dict[str, Any]] = []
    for name, new in track(makers.items(), title):
        for budget in budgets:
            tally = Tally()
            for line in lines:
                replay(new(), line, budget, tally)
            rows.append({"drafter": name, "nodes": budget, "tokens_per_step": round(tally.tokens_per_step, 4)})
    columns = {"drafter": "drafter", "nodes": "nodes", "tokens\nper step": "tokens_per_step:.3f"}
    report.print_figures(title, columns, rows)
    return rows


if __name__ == "__main__":
    typer.run(main)
