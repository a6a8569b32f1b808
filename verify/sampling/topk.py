"""The largest of a vocabulary's logits, found without sorting them, and log-probabilities.

A row is cut into groups with a stride. The K largest maxima of groups bound the K-th largest logit from below, so few logits
remain to be sorted. Maxima over strided groups are computed as fast as memory is read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from outrider.drafters.interface import Ints, Logprobs
from outrider.verify.model.cpu.native import sampling as compiled
from outrider.verify.sampling.rows import Logits

if TYPE_CHECKING:
    from outrider.verify.sampling.device import Together

GROUP_SIZE = 64
# A row is cut into at least this many groups for each of the K logits.
GROUPS = 4


def largest(logits: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """Ids of the `count` largest of one row of logits [V], the largest first; fewer if all others are -inf.

    Of equal logits, the smaller id is first.
    """
    bound = float(np.finfo(np.float32).min)
    size = min(GROUP_SIZE, len(logits) // (GROUPS * count))
    if size > 1:
        groups = len(logits) // size
        cut = groups * size
        maxima = logits[:cut].reshape(size, groups).max(0)
        bound = max(bound, float(np.partition(maxima, groups - count)[groups - count]))
        reaching = np.flatnonzero(maxima >= bound)
        members = np.arange(0, cut, groups)[:, None] + reaching  # ascending
        ids = np.concatenate([members.ravel(), np.arange(cut, len(logits))])
        ids = ids[logits[ids] >= bound]
    else:
        ids = np.flatnonzero(logits >= bound)
    order = np.argsort(-logits[ids], kind="stable")
    return ids[order[:count]]


def likeliest(logits: Logits, count: int, together: Together | None = None) -> tuple[Any, Any]:
    """The `count` likeliest tokens of each row of logits [M, V]: int32 ids and float32 probabilities, [M, count].

    Arrays, or for logits on a device, tensors there; waits for nothing then.
    """
    if not isinstance(logits, np.ndarray):
        from outrider.verify.sampling import device  # imports torch

        return device.likeliest(logits, count, together)
    if not count:
        return np.empty((len(logits), 0), np.int32), np.empty((len(logits), 0), np.float32)
    logits = np.ascontiguousarray(logits)
    if compiled.can_read(logits):
        return compiled.likeliest(logits, count)
    found = np.argpartition(-logits, count - 1, 1)[:, :count]
    values = np.take_along_axis(logits, found, 1)
    order = np.argsort(-values, 1, kind="stable")
    top = logits.max(1, keepdims=True)
    shares = np.exp(np.take_along_axis(values, order, 1) - top) / np.exp(logits - top).sum(1, keepdims=True)
    return np.take_along_axis(found, order, 1).astype(np.int32), shares


def logprobs_of(logits: Logits, tokens: Ints, count: int) -> Logprobs:
    """Log-probabilities of `tokens` [A+1] and of the `count` likeliest tokens, one per row of `logits` [A+1, V]."""
    if not isinstance(logits, np.ndarray):
        from outrider.verify.sampling import device  # imports torch

        return Logprobs(*device.logprobs(logits, tokens, count))
    values = logits - logits.max(1, keepdims=True)
    values -= np.log(np.exp(values).sum(1, keepdims=True))
    ids, _ = likeliest(logits, count)
    return Logprobs(values[np.arange(len(tokens)), tokens], ids, np.take_along_axis(values, ids, 1))
