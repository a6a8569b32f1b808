"""Fits the mixture's prior on held-out documents of a corpus: `python -m training.fit_prior --corpus FILE --tokenizer T`.

One document in ten is held out and read like a session, with the others as the corpus. Repeated passes fit the trust table,
then the ratio of measured to predicted frequencies gives the boost table. The result, drafters/tables/prior.safetensors,
holds numbers per bucket and cell and no text, and serves every model and corpus.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray

from bench.recordings import load_corpus, load_encoder
from outrider.drafters.kernel import kernel
from outrider.drafters.tables import array_file
from outrider.drafters.tables.base_table import empty_base
from outrider.drafters.tables.contexts import LENGTHS, Contexts, Sources, enter, new_contexts
from outrider.drafters.tables.history import new_history
from outrider.drafters.tables.learned_table import new_rows
from outrider.drafters.tables.levels import BUCKETS, COPY, DIVERSITIES, PREDICTION, SIZES, TABLE, Scratch, new_scratch
from outrider.drafters.tables.mixture import CELLS, MAX_BOOST, MIN_MASS, PRIOR_FILE, STRENGTH, cell, commit, predict
from outrider.drafters.tables.suffix import Corpus, index

PASSES = 2
# Every tenth document is held out.
HELD_OUT = 10


def main(
    corpus: Annotated[list[Path], typer.Option(help="Text file; repeatable.")],
    tokenizer: Annotated[str, typer.Option(help="Folder, hub id or sentencepiece .model file.")],
    out: Annotated[Path, typer.Option(help="File to write.")] = PRIOR_FILE,
) -> None:
    """Fit the mixture's prior."""
    encoder = load_encoder(tokenizer)
    separator = len(encoder)
    text = load_corpus(corpus, encoder)
    documents = np.split(text, np.flatnonzero(text == separator)[1:])
    held_out = [d[1:].astype(np.int32) for d in documents[::HELD_OUT]]
    block = index(np.concatenate([d for i, d in enumerate(documents) if i % HELD_OUT]), separator)
    trust = initial_trust()
    scratch = new_scratch(separator + 1, 1, 1)
    for number in range(PASSES):
        hits, tries, score = 2.0 * trust, np.full(BUCKETS, 2.0), 0.0
        for document in held_out:
            sources, contexts = new_session(block, hits, tries)
            score += read(sources, contexts, scratch, document)
        trust = hits / tries
        print(f"pass {number}: {-score / math.log(2) / sum(map(len, held_out)):.3f} bits per token")
    frequencies = np.full((2, CELLS), 2.0)
    for document in held_out:
        sources, contexts = new_session(block, trust * STRENGTH, np.full(BUCKETS, STRENGTH))
        add_frequencies(sources, contexts, scratch, document, frequencies)
    boost = np.minimum(frequencies[1] / frequencies[0], MAX_BOOST)
    array_file.save(out, "prior", "none", {"trust": trust, "boost": boost})
    print(f"{out}: {out.stat().st_size} bytes")


def initial_trust() -> NDArray[np.float64]:
    """The trust before the first pass, float64 [BUCKETS].

    0.5 for counts; for the table it grows with its likeliest token's probability, for a prediction and a copy
    with the tokens matched.
    """
    trust = np.full((5, LENGTHS, SIZES, DIVERSITIES), 0.5)
    trust[TABLE] = np.linspace(0.4, 0.9, SIZES)[None, :, None]
    trust[[PREDICTION, COPY]] = np.array([0.6, 0.8, 0.9, 0.95, 0.97, 0.98, 0.99, 0.99])[:, None]
    return trust.ravel()


def new_session(block: Corpus, hits: NDArray[np.float64], tries: NDArray[np.float64]) -> tuple[Sources, Contexts]:
    """A new session over `block` that updates `hits` and `tries`."""
    sources = Sources(
        corpora=(block,),
        history=new_history(4096),
        base=empty_base(),
        rows=new_rows(16, 1),
        expected=np.zeros(1, np.int32),
        hits=hits,
        tries=tries,
        boost=np.ones(CELLS),
    )
    contexts = new_contexts(1, 1)
    enter(sources, contexts, np.empty(0, np.int32))
    return sources, contexts


@kernel
def read(sources: Sources, contexts: Contexts, scratch: Scratch, text: NDArray[np.int32]) -> float:
    """Commits a document's tokens; returns its log-probability in nats."""
    score = 0.0
    for token in text:
        score += commit(sources, contexts, scratch, token)
    return score


@kernel
def add_frequencies(
    sources: Sources, contexts: Contexts, scratch: Scratch, text: NDArray[np.int32], frequencies: NDArray[np.float64]
) -> None:
    """Adds each predicted token's predicted (row 0) and measured (row 1) frequency to its cell; float64 [2, CELLS]."""
    for token in text:
        for x in range(predict(sources, contexts, 0, scratch, MIN_MASS)):
            frequencies[0, cell(scratch, x)] += scratch.probability[x]
            frequencies[1, cell(scratch, x)] += scratch.out[x] == token
        commit(sources, contexts, scratch, token)


if __name__ == "__main__":
    typer.run(main)
