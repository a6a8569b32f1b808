"""Fits the mixture's prior on held-out documents of a corpus: `python -m bench.fit --corpus FILE --tokenizer T`.

One document in ten is held out and read like a session, with the others as the corpus. EM learns how far each kind of
level is to be trusted; then predicted and measured frequencies give the boost table. The result,
drafters/tables/prior.safetensors, holds numbers by kind of context only, no text, and serves every model and corpus.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray

from bench.recordings import load_corpus, load_encoder
from drafters.fusion import enter
from drafters.tables import array_file
from drafters.tables.adaptive import new_rows
from drafters.tables.history import new_history
from drafters.tables.kernel import kernel
from drafters.tables.levels import (
    BUCKETS,
    KINDS,
    LENGTHS,
    PREDICTION,
    SIZES,
    TABLE,
    Contexts,
    Scratch,
    Sources,
    new_contexts,
    new_scratch,
)
from drafters.tables.mixture import CELLS, LEAST_MASS, MOST_BOOST, PRIOR, STRENGTH, cell, commit, predict
from drafters.tables.ngram import empty_base
from drafters.tables.suffix import Corpus, index

PASSES = 2
HELD_OUT = 10  # one document in so many


def main(
    corpus: Annotated[list[Path], typer.Option(help="Texts; may be given again.")],
    tokenizer: Annotated[str, typer.Option(help="A folder, a hub id, or a sentencepiece .model file.")],
    out: Annotated[Path, typer.Option()] = PRIOR,
) -> None:
    """Fit the mixture's prior."""
    encoder = load_encoder(tokenizer)
    separator = len(encoder)
    text = load_corpus(corpus, encoder)
    documents = np.split(text, np.flatnonzero(text == separator)[1:])
    held_out = [d[1:].astype(np.int32) for d in documents[::HELD_OUT]]
    block = index(np.concatenate([d for i, d in enumerate(documents) if i % HELD_OUT]), separator)
    trust = start()
    scratch = new_scratch(separator + 1, 1, 1)
    for number in range(PASSES):
        hits, tries, score = 2.0 * trust, np.full(BUCKETS, 2.0), 0.0
        for document in held_out:
            sources, contexts = fresh(block, hits, tries)
            score += read(sources, contexts, scratch, document)
        trust = hits / tries
        print(f"pass {number}: {-score / math.log(2) / sum(map(len, held_out)):.3f} bits per token")
    seen = np.full((2, CELLS), 2.0)
    for document in held_out:
        sources, contexts = fresh(block, trust * STRENGTH, np.full(BUCKETS, STRENGTH))
        compare(sources, contexts, scratch, document, seen)
    boost = np.minimum(seen[1] / seen[0], MOST_BOOST)
    array_file.save(out, "prior", "none", {"trust": trust, "boost": boost})
    print(f"{out}: {out.stat().st_size} bytes")


def start() -> NDArray[np.float64]:
    """Trust before any text: half for counts; for the table by its likeliest token, for a prediction by how long it holds."""
    trust = np.full((4, LENGTHS, SIZES, KINDS), 0.5)
    trust[TABLE] = np.linspace(0.4, 0.9, SIZES)[None, :, None]
    trust[PREDICTION] = np.array([0.6, 0.8, 0.9, 0.95, 0.97, 0.98, 0.99, 0.99])[None, :, None]
    return trust.ravel()


def fresh(block: Corpus, hits: NDArray[np.float64], tries: NDArray[np.float64]) -> tuple[Sources, Contexts]:
    """A new session over `block` that learns into `hits` and `tries`."""
    sources = Sources(
        *((block,), new_history(4096), empty_base(), new_rows(16, 1)),
        *(np.zeros(1, np.int32), hits, tries, np.ones(CELLS)),
    )
    contexts = new_contexts(1, 1)
    enter(sources, contexts, np.empty(0, np.int32))
    return sources, contexts


@kernel
def read(sources: Sources, contexts: Contexts, scratch: Scratch, text: NDArray[np.int32]) -> float:
    """Reads a document like a session; returns its log-probability in nats."""
    score = 0.0
    for token in text:
        score += commit(sources, contexts, scratch, token)
    return score


@kernel
def compare(sources: Sources, contexts: Contexts, scratch: Scratch, text: NDArray[np.int32], seen: NDArray[np.float64]) -> None:
    """Adds each listed successor's predicted (row 0) and measured (row 1) frequency to its cell."""
    for token in text:
        for x in range(predict(sources, contexts, 0, scratch, LEAST_MASS)):
            seen[0, cell(scratch, x)] += scratch.probability[x]
            seen[1, cell(scratch, x)] += scratch.out[x] == token
        commit(sources, contexts, scratch, token)


if __name__ == "__main__":
    typer.run(main)
