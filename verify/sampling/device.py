"""What a GPU decides: choices and rankings of whole batches of rows. Only `distribution` waits for it.

The same rules as in `outrider.verify.sampling.sampler`, which decides row by row on the host, with the same noise.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.verify.model.transfer import Copy, Download, to_device
from outrider.verify.sampling.precision import MASS_SCALE, check_finite
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


def uploaded(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    return to_device(torch.from_numpy(array), device)


def uploaded_masks(allowed: NDArray[np.bool_], device: torch.device) -> torch.Tensor:
    """See `outrider.verify.sampling.rows`. They are packed for the way: eight masks are as many bytes as one."""
    packed = uploaded(np.packbits(allowed, 1, bitorder="little"), device)
    bits = packed[..., None] >> torch.arange(8, dtype=torch.uint8, device=device) & 1
    return bits.flatten(1)[:, : allowed.shape[1]].bool()


def warp_logits(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Applies temperature, top-k, top-p and min-p in this order: logits [M, V] to log-weights, float32 [M, V].

    Their softmax is the distribution to sample from; excluded tokens get -inf. Of equal logits, the smaller id ranks first.
    """
    logits = logits.float()
    weights = (logits - logits.amax(-1, keepdim=True)) / params.temperature  # at most 0: tiny temperatures do not overflow
    if params.top_k or params.top_p < 1.0:
        order = logits.sort(dim=-1, descending=True, stable=True).indices
        kept = torch.ones_like(order, dtype=torch.bool)
        if params.top_k:
            kept[:, params.top_k :] = False
        if params.top_p < 1.0:
            mass = weights.gather(-1, order).exp().mul_(MASS_SCALE).long().masked_fill_(~kept, 0)
            needed = (mass.sum(-1, keepdim=True).double() * params.top_p).ceil().long().clamp(min=1)
            kept &= mass.cumsum(-1) - mass < needed
        weights = weights.masked_fill(~torch.empty_like(kept).scatter_(-1, order, kept), -torch.inf)
    if params.min_p:
        weights = weights.masked_fill(weights < math.log(params.min_p), -torch.inf)
    return weights


def likeliest(logits: torch.Tensor, count: int, together: Together | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` likeliest tokens of each row of logits [M, V]: int32 ids and float32 probabilities, [M, count]."""
    if not count:
        return torch.empty(len(logits), 0, dtype=torch.int32), torch.empty(len(logits), 0)
    return ranking_of(logits, together).of(logits, count)


def ranking_of(logits: torch.Tensor, together: Together | None) -> Ranking:
    return Ranking(logits) if together is None else together.ranking_of(logits)


def choices(
    logits: torch.Tensor, params: SamplingParams, positions: Sequence[int], extra: Sequence[Any], together: Together | None
) -> Download:
    """The token of each row of logits [M, V], the largest probability, [M] each, and other tensors, on the way to the host.

    The probability is not a number if the row's largest logit is not finite.
    """
    ranking = ranking_of(logits, together)
    likely, probability = ranking.of(logits, 1)
    chosen = likely[:, 0] if params.greedy else ranking.sampled(logits, params, positions)
    return Download(chosen, probability[:, 0], *extra, shared=None if together is None else together.copy)


def draw(
    logits: torch.Tensor, params: SamplingParams, positions: Sequence[int], count: int, vocabulary: int | None = None
) -> list[NDArray[Any]]:
    """For each row of logits [M, V], `count` tokens that are sampled without replacement, and their probabilities, [M, count].

    With `vocabulary`, also the whole distributions, float32 [M, vocabulary]. Waits for the device.
    """
    from outrider.verify.model.gpu import triton_sampling  # Triton is only needed on a GPU

    tokens, probabilities = triton_sampling.draw(logits, params, positions, count)
    if vocabulary is None:
        return Download(tokens, probabilities).arrays()
    shares = warp_logits(logits, params).softmax(-1)
    whole = torch.nn.functional.pad(shares, (0, vocabulary - shares.shape[-1]))
    return Download(tokens, shares.gather(-1, tokens.long()), whole).arrays()


def distribution(logits: torch.Tensor, params: SamplingParams) -> NDArray[np.float64]:
    """`outrider.verify.sampling.sampler.distribution`; waits for the device."""
    found: NDArray[np.float64] = warp_logits(logits[None], params)[0].double().softmax(-1).cpu().numpy()
    check_finite(found.sum())
    return found


def logprobs(logits: torch.Tensor, tokens: NDArray[np.int32], count: int) -> list[Any]:
    """As `outrider.verify.sampling.topk.logprobs_of`, the arrays of its result."""
    values = logits.float().log_softmax(-1)
    chosen = values.gather(1, to_device(torch.from_numpy(tokens).long(), values.device)[:, None])[:, 0]
    top, ids = values.topk(count, -1)
    return Download(chosen, ids.int(), top).arrays()


def copies(parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    rows = joined(parts)
    return [each.clone() for each in parts] if rows is None else [*rows.clone().split([*map(len, parts)])]
