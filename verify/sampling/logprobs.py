"""Log-probabilities of tokens and of the likeliest ones, as requests ask for them."""

from __future__ import annotations

import numpy as np

from outrider.drafters.interface import Ints, Logprobs
from outrider.verify.sampling.largest import likeliest
from outrider.verify.sampling.rows import Logits


def logprobs_of(logits: Logits, tokens: Ints, count: int) -> Logprobs:
    """Log-probabilities of `tokens` [A+1] and of the `count` likeliest tokens, one per row of `logits` [A+1, V]."""
    if not isinstance(logits, np.ndarray):
        from outrider.verify.sampling import device  # imports torch

        return Logprobs(*device.logprobs(logits, tokens, count))
    values = logits - logits.max(1, keepdims=True)
    values -= np.log(np.exp(values).sum(1, keepdims=True))
    ids, _ = likeliest(logits, count)
    return Logprobs(values[np.arange(len(tokens)), tokens], ids, np.take_along_axis(values, ids, 1))
