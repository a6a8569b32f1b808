"""The largest of a vocabulary's logits, found without sorting them.

A row is cut into groups with a stride. The K largest maxima of groups bound the K-th largest logit from below, so few logits
remain to be sorted. Maxima over strided groups are computed as fast as memory is read.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from outrider.verify.model.cpu import native

GROUP_SIZE = 64
# A row is cut into at least this many groups for each of the K logits.
GROUPS = 4


def largest(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Ids of the `count` largest of one row of logits [V], the largest first; fewer if all others are -inf.

    Of equal logits, the smaller id is first.
    """
    bound = torch.finfo(logits.dtype).min
    size = min(GROUP_SIZE, len(logits) // (GROUPS * count))
    if size > 1:
        groups = len(logits) // size
        cut = groups * size
        maxima = logits[:cut].view(size, groups).amax(0)
        bound = max(bound, float(maxima.topk(count).values[-1]))
        reaching = (maxima >= bound).nonzero()[:, 0]
        members = torch.arange(0, cut, groups)[:, None] + reaching  # ascending
        ids = torch.cat([members.flatten(), torch.arange(cut, len(logits))])
        ids = ids[logits[ids] >= bound]
    else:
        ids = (logits >= bound).nonzero()[:, 0]
    order = logits[ids].sort(descending=True, stable=True).indices
    return ids[order[:count]]


def likeliest(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` likeliest tokens of each row of logits [M, V]: int32 ids and float32 probabilities, [M, count].

    Waits for nothing on a GPU. Probabilities are as exact as the logits' dtype.
    """
    if not count:
        return torch.empty(len(logits), 0, dtype=torch.int32), torch.empty(len(logits), 0)
    if native.can_read(logits):
        return native.likeliest(logits, count)
    if logits.device.type == "cuda":
        together: Ranking | None = getattr(_thread, "ranking", None)
        return (together or Ranking(logits)).of(logits, min(count, logits.shape[1]))
    values, ids = _top(logits, count)
    top = values[:, :1]
    mass = (logits - top).exp_().sum(-1, keepdim=True, dtype=torch.float32)
    return ids.int(), (values - top).float().exp() / mass


class Ranking:
    """The likeliest tokens of rows on a GPU, which are ranked together as soon as some of them are asked for."""

    def __init__(self, rows: torch.Tensor) -> None:
        """`rows` are logits [M, V]."""
        self._rows = rows
        self._found: tuple[torch.Tensor, torch.Tensor] | None = None

    def of(self, logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """As `likeliest`. Logits that are not among the rows are ranked alone."""
        from outrider.verify.model.gpu import triton_sampling  # Triton is only needed on a GPU

        first = 0 if logits is self._rows else first_row(logits, self._rows)
        if first is None:
            return triton_sampling.likeliest(logits, count)
        if self._found is None or self._found[0].shape[1] < count:
            self._found = triton_sampling.likeliest(self._rows, count)
        ids, probabilities = (each[first : first + len(logits), :count] for each in self._found)
        return ids, probabilities


@contextmanager
def ranked_together(parts: Sequence[torch.Tensor]) -> Iterator[None]:
    """Inside, this thread ranks logits [M, V] of several streams together, if they follow each other in a GPU's memory."""
    filled = [part for part in parts if len(part)]
    rows = joined(filled) if filled and filled[0].device.type == "cuda" else None
    _thread.ranking = None if rows is None else Ranking(rows)
    try:
        yield
    finally:
        _thread.ranking = None


_thread = threading.local()


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Views [M, V] that follow each other in one tensor as one view; None if they do not."""
    first = parts[0]
    rows = first.as_strided((sum(map(len, parts)), first.shape[1]), first.stride()) if is_one_storage(parts) else None
    start = 0
    for part in parts:
        if rows is None or first_row(part, rows) != start:
            return None
        start += len(part)
    return rows


def is_one_storage(parts: Sequence[torch.Tensor]) -> bool:
    """Whether the tensors have their memory in common."""
    return len({part.untyped_storage().data_ptr() for part in parts}) == 1


def first_row(part: torch.Tensor, rows: torch.Tensor) -> int | None:
    """Where a view [N, V] of rows [M, V] begins; None if it is not one."""
    if part.dtype != rows.dtype or part.stride() != rows.stride() or not is_one_storage([part, rows]):
        return None
    first, rest = divmod(int(part.storage_offset()) - int(rows.storage_offset()), rows.stride(0))
    return None if rest or not 0 <= first <= len(rows) - len(part) else first


def _top(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`torch.topk` of each row; of equal values, any."""
    groups = logits.shape[1] // GROUP_SIZE
    if groups < 2 * count:
        return logits.topk(count, -1)
    cut = groups * GROUP_SIZE
    maxima = logits[:, :cut].unflatten(1, (GROUP_SIZE, groups)).amax(1)
    members = torch.arange(GROUP_SIZE, device=logits.device) * groups
    within = (maxima.topk(count, -1).indices[..., None] + members).flatten(1)
    rest = torch.arange(cut, logits.shape[1], device=logits.device).expand(len(logits), -1)
    ids = torch.cat([within, rest], 1)
    values, index = logits.gather(1, ids).topk(count, -1)
    return values, ids.gather(1, index)
