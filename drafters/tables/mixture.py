"""P(next token) from counts alone: where a text stands in every source, and what each source lists there.

A *level* is a source and a context length, for example "the corpus after the last 3 tokens", "the session after the last
5", "the span that the session copies", "the tri-gram table" or "the client's prediction". It lists successors t with shares
q(t). A table gives the trust in a level by source, context length, number of occurrences and diversity of successors. Over
the levels i, longest context first,

    P(t) = sum_i  trust_i * prod_{j before i} (1 - trust_j) * q_i(t).

The prior of the trust table was fitted once on held-out documents of a corpus; it holds no text. A session keeps
updating it with every committed token, drafted or not. A linear mixture gives no extra weight to a token on which two
sources agree, so P(t) is multiplied by `boost`, the ratio of measured to predicted frequency in its cell, fitted on the
same documents.

A *copy* follows one earlier span that the text repeats, longer than any context: an answer that edits a file repeats it from
the prompt with small changes. Where the text departs from the span, the copy goes on nearby.
"""

from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.drafters.native.library import native, structure, zeros
from outrider.drafters.tables import array_file
from outrider.drafters.tables.base_table import BaseArrays
from outrider.drafters.tables.learned_table import LearnedRows
from outrider.drafters.tables.suffix import DENSE, LONGEST_CONTEXT, Corpus

# Contexts have 0 to LONGEST_CONTEXT tokens.
LENGTHS = LONGEST_CONTEXT + 1
# The successors of the empty context are this many of the latest tokens.
MAX_RECENT = 128
# The numbers that are the state of a copy (history.h).
COPY_STATE = 5
# The entries of the trust table: sources, lengths, and classes of the occurrences and of the diversity of a context (levels.h).
BUCKETS = 5 * LENGTHS * 8 * 6
MAX_SUCCESSORS = 512
# Probabilities are divided into cells by powers of two (mixture.h).
CELLS = LENGTHS * 4 * 12
# The pseudo-count of the fitted trust at the start of a session.
STRENGTH = 8.0
PRIOR_FILE = Path(__file__).parent / "prior.safetensors"


@structure
class History(NamedTuple):
    """A session's own text, indexed by its contexts: a ring buffer of C tokens, C a power of two.

    There is one hash chain of earlier occurrences per context length. Memory is bounded and time per token constant: new text
    overwrites the oldest. A position counts from the start of the session's text.
    """

    text: NDArray[np.int32]  # [C]
    # The tokens appended so far, and the last departure that left out tokens of a span: the token before it and the number
    # left out.
    size: NDArray[np.int64]  # [3]
    newest: NDArray[np.int64]  # [L+1, 2C]; by context length and hash: the latest position after such a context, -1 = none
    older: NDArray[np.int64]  # [L+1, C]; the previous position in the same chain
    hashes: NDArray[np.uint64]  # [L+1, C]; hashes of the contexts before the position


def new_history(capacity: int) -> History:
    """Room for `capacity` tokens (rounded up to a power of two)."""
    size = 1 << max(4, (capacity - 1).bit_length())
    newest, older = np.full((LENGTHS, 2 * size), -1, np.int64), np.full((LENGTHS, size), -1, np.int64)
    return zeros(History, (LENGTHS, size), text=size, size=np.array([0, -1, 0], np.int64), newest=newest, older=older)


@structure
class Sources(NamedTuple):
    """The data that predictions are made from."""

    corpora: tuple[Corpus, ...]  # at least one while a request runs; may be empty texts
    history: History
    base: BaseArrays
    rows: LearnedRows
    expected: NDArray[np.int32]  # [M+1]; the length M of the client's prediction, then its tokens
    hits: NDArray[np.float64]  # [BUCKETS]; trust = hits / tries
    tries: NDArray[np.float64]  # [BUCKETS]
    boost: NDArray[np.float64]  # [CELLS]; read-only


@structure
class Contexts(NamedTuple):
    """The position of each context in each source. Row 0 is the committed text; further rows are draft nodes."""

    low: NDArray[np.int64]  # [N, corpora, LENGTHS]; suffix-array ranges of the last 0, 1, 2 ... tokens
    high: NDArray[np.int64]  # [N, corpora, LENGTHS]
    hashes: NDArray[np.uint64]  # [N, LENGTHS]; of the last 0, 1, 2 ... tokens
    last: NDArray[np.int64]  # [N, 2 + COPY_STATE]; the last two tokens, -1 = none, and the copy
    expected: NDArray[np.int32]  # [N, 2]; index into `Sources.expected`, 0 = not aligned; tokens matched in a row


def new_contexts(size: int, corpora: int) -> Contexts:
    last = np.full((size, 2 + COPY_STATE), -1, np.int64)
    return zeros(Contexts, (size, corpora, LENGTHS), hashes=(size, LENGTHS), last=last, expected=(size, 2))


@partial(native, module="contexts")
def enter(sources: Sources, contexts: Contexts, ending: NDArray[np.int32]) -> None:
    """Sets context row 0 to a text that ends with `ending`, without learning from it."""


@structure
class Scratch(NamedTuple):
    """Preallocated buffers for one prediction. `W` holds the successors of all levels, one level after another."""

    tokens: NDArray[np.int64]  # [W]
    counts: NDArray[np.float64]  # [W]
    starts: NDArray[np.int64]  # [levels + 1]; level i lists [starts[i], starts[i + 1]); starts[0] = 0
    buckets: NDArray[np.int64]  # [levels]; entry of the trust table
    discounts: NDArray[np.float64]  # [levels]
    norms: NDArray[np.float64]  # [levels]; q(t) = (count - discount) / norm
    level_lengths: NDArray[np.int64]  # [levels]; context length
    level_sources: NDArray[np.int64]  # [levels]
    index_of: NDArray[np.int32]  # [V]; a token's index in `out`
    out: NDArray[np.int64]  # [MAX_SUCCESSORS]; predicted tokens
    probability: NDArray[np.float64]  # [MAX_SUCCESSORS]
    out_length: NDArray[np.int64]  # [MAX_SUCCESSORS]; context length of the first level that listed the token
    out_source: NDArray[np.int64]  # [MAX_SUCCESSORS]; source of that level
    out_agreement: NDArray[np.int64]  # [MAX_SUCCESSORS]; bit 0: a corpus listed the token, bit 1: the session did
    recent: NDArray[np.int64]  # [3]; the session's empty context: text size when counted, successors, occurrences
    recent_tokens: NDArray[np.int64]  # [MAX_RECENT]; its successors, shared by all nodes of a tree
    recent_counts: NDArray[np.float64]  # [MAX_RECENT]
    row_tokens: NDArray[np.int32]  # [S]; successors in the tri-gram table
    row_probabilities: NDArray[np.float32]  # [S]


def new_scratch(vocabulary: int, corpora: int, row: int) -> Scratch:
    """Buffers for token ids below `vocabulary` and tri-gram rows of `row` successors."""
    levels = LENGTHS * (corpora + 1) + 4
    width = levels * (DENSE + 128)
    sizes = {"tokens": width, "counts": width, "starts": levels + 1, "index_of": vocabulary}
    sizes |= dict.fromkeys(("out", "probability", "out_length", "out_source", "out_agreement"), MAX_SUCCESSORS)
    sizes |= {"recent_tokens": MAX_RECENT, "recent_counts": MAX_RECENT, "row_tokens": row, "row_probabilities": row}
    return zeros(Scratch, levels, **sizes, recent=np.full(3, -1, np.int64))


def load_prior() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The fitted trust, float64 [BUCKETS], and boost, float64 [CELLS]. Raises ArrayFileError."""
    arrays = array_file.load(PRIOR_FILE, "prior").arrays
    return arrays["trust"], arrays["boost"]
