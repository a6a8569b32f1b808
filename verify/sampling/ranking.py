"""Rows of several streams on a GPU that are ranked, and whose tokens are sampled, together."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.verify.model.transfer import Copy
from outrider.verify.sampling_params import SamplingParams


class Ranking:
    """Rows on a GPU, ranked together as soon as some of them are asked for; their tokens are sampled together at the end."""

    def __init__(self, rows: torch.Tensor, is_shared: bool = False) -> None:
        """`rows` are logits [M, V]. If it `is_shared`, tokens are sampled by `sample`, else at once."""
        self._rows, self._is_shared = rows, is_shared
        self._found: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        self._chosen: torch.Tensor | None = None  # int32 [M]
        self._sampled: list[tuple[int, SamplingParams, Sequence[int]]] = []

    def has(self, logits: torch.Tensor) -> bool:
        """Whether these logits are among the rows."""
        return logits is self._rows or first_row(logits, self._rows) is not None

    def of(self, logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`likeliest` for a subset of the rows."""
        first = self._first(logits)
        ids, probabilities = (each[first : first + len(logits), :count] for each in self._ranked(count)[:2])
        return ids, probabilities

    def sampled(self, logits: torch.Tensor, params: SamplingParams, positions: Sequence[int]) -> torch.Tensor:
        """The tokens of some of the rows, int32 [M]. If shared, memory that `sample` writes to."""
        first = self._first(logits)
        self._sampled.append((first, params, positions))
        if not self._is_shared:
            return self.sample()
        if self._chosen is None:
            self._chosen = torch.empty(len(self._rows), dtype=torch.int32, device=self._rows.device)
        return self._chosen[first : first + len(logits)]

    def sample(self) -> torch.Tensor:
        """Chooses the tokens that have been asked for, int32 by row."""
        from outrider.verify.model.gpu import triton_sampling

        sampled = [triton_sampling.Sampled(*each) for each in self._sampled]
        found = triton_sampling.choose(self._rows, self._ranked(1)[2], sampled)
        return found if self._chosen is None else self._chosen.copy_(found)

    def end(self) -> None:
        """Samples what is missing."""
        if self._sampled:
            self.sample()

    def _ranked(self, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The rows' likeliest tokens, `count` at least if there are as many."""
        from outrider.verify.model.gpu import triton_sampling

        count = min(count, self._rows.shape[1])
        if self._found is None or self._found[0].shape[1] < count:
            self._found = triton_sampling.likeliest(self._rows, count)
        return self._found

    def _first(self, logits: torch.Tensor) -> int:
        """The number of the row with which these logits begin."""
        first = 0 if logits is self._rows else first_row(logits, self._rows)
        assert first is not None
        return first


class Together:
    """The decisions of several streams: their rows are ranked and sampled together, and downloaded in one copy."""

    def __init__(self, parts: Sequence[torch.Tensor]) -> None:
        """`parts` are the streams' logits [M, V]; they are ranked together if they follow each other in a GPU's memory."""
        filled = [part for part in parts if len(part)]
        rows = joined(filled) if filled and filled[0].device.type == "cuda" else None
        self._ranking = None if rows is None else Ranking(rows, is_shared=True)
        self.copy = Copy()

    def ranking_of(self, logits: torch.Tensor) -> Ranking:
        """The common ranking, if it has these rows, else one of their own."""
        shared = self._ranking
        return shared if shared is not None and shared.has(logits) else Ranking(logits)

    def end(self) -> None:
        """Samples what is missing, and queues the copy."""
        if self._ranking is not None:
            self._ranking.end()
        self.copy.start()


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
    """The first row of a view [N, V] of rows [M, V]; None if it is not one."""
    if part.dtype != rows.dtype or part.stride() != rows.stride() or not is_one_storage([part, rows]):
        return None
    first, rest = divmod(int(part.storage_offset()) - int(rows.storage_offset()), rows.stride(0))
    return None if rest or not 0 <= first <= len(rows) - len(part) else first
