"""P(next token) from counts alone: all levels of a context, interpolated by learned trust.

Over the levels i that `outrider.drafters.tables.levels` lists, longest context first,

    P(t) = sum_i  trust_i * prod_{j before i} (1 - trust_j) * q_i(t).

The prior of the trust table was fitted once on held-out documents of a corpus; it holds no text. A session keeps
updating it with every committed token, drafted or not. A linear mixture gives no extra weight to a token on which two
sources agree, so P(t) is multiplied by `boost`, the ratio of measured to predicted frequency in its cell, fitted on the
same documents.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from outrider.drafters.native.library import native
from outrider.drafters.tables import array_file
from outrider.drafters.tables.contexts import LENGTHS, Contexts, Sources
from outrider.drafters.tables.levels import Scratch

# Probabilities are divided into cells by powers of two.
POWERS = 12
CELLS = LENGTHS * 4 * POWERS
# The pseudo-count of the fitted trust at the start of a session.
STRENGTH = 8.0
# Shorter contexts are skipped once less mass remains.
MIN_MASS = 1e-3
PRIOR_FILE = Path(__file__).parent / "prior.safetensors"


def load_prior() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The fitted trust, float64 [BUCKETS], and boost, float64 [CELLS]. Raises ArrayFileError."""
    arrays = array_file.load(PRIOR_FILE, "prior").arrays
    return arrays["trust"], arrays["boost"]


@native
def predict(sources: Sources, contexts: Contexts, row: int, scratch: Scratch, min_mass: float) -> int:
    """P(. | context `row`) into `scratch.out` and `scratch.probability`, unsorted; returns the number of tokens."""


@native
def cell(scratch: Scratch, x: int) -> int:
    """The boost table's entry for predicted token `x`: by context length, agreement, and power of two of P(t)."""


@native
def commit(sources: Sources, contexts: Contexts, scratch: Scratch, token: int) -> float:
    """Appends a token to row 0 and the history, and updates the trust of every level.

    Trust is the mean of a level's responsibilities: the probability that it, and no shorter context, gave the token. All tokens
    count, also those that a longer context gave; EM would weigh each by the probability that the level was reached.

    Returns the natural logarithm of the probability that the mixture gave the token.
    """
