"""Logits processing before sampling: penalties, biases, minimum lengths and a grammar's masks.

All counts follow each node's own path, so a node of a draft tree is processed as plain decoding would process it. Knows
nothing about temperature or noise.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.drafters.interface import DraftTree, Ints
from outrider.verify.model.transfer import to_device
from outrider.verify.sampling_params import SamplingParams

# Beyond these bounds of a repetition penalty, scaled logits overflow float32.
MIN_FACTOR, MAX_FACTOR = 1e-30, 1e30


class ProcessedLogits:
    """The logits of a step's root and nodes, processed when they are read: an acceptance rule reads few of the rows."""

    def __init__(
        self,
        processor: LogitsProcessor,
        logits: torch.Tensor,  # [N+1, V]; the model's logits
        tree: DraftTree,
        emitted: int,  # tokens of the answer before the step
        allowed: NDArray[np.bool_] | None = None,  # [N+1, V]; a grammar's masks
    ) -> None:
        self._processor, self._logits, self._tree, self._emitted = processor, logits, tree, emitted
        self._allowed = allowed

    @property
    def device(self) -> torch.device:
        return self._logits.device

    def __getitem__(self, rows: int | slice) -> torch.Tensor:
        """The logits [V] of the root (row 0) or of node `row - 1`, or those of several rows, [M, V]."""
        return self._process(rows) if isinstance(rows, slice) else self._process(slice(rows, rows + 1))[0]

    def _process(self, rows: slice) -> torch.Tensor:
        """Logits [M, V] of M rows.

        In a row whose allowed tokens are all excluded by the other rules, only the grammar applies.
        """
        logits = self._logits[rows]
        adjusted = self._processor.adjust(logits, self._tree, rows, self._emitted)
        if self._allowed is None:
            return adjusted
        forbidden = ~masks_on(self._allowed[rows], logits.device)
        masked = adjusted.masked_fill(forbidden, -torch.inf)
        stuck = masked.amax(-1, keepdim=True) == -torch.inf
        return torch.where(stuck, logits.to(masked.dtype).masked_fill(forbidden, -torch.inf), masked)


def masks_on(allowed: NDArray[np.bool_], device: torch.device) -> torch.Tensor:
    """Masks [M, V] on the device. They are packed for the way to a GPU: eight masks are as many bytes as one."""
    if device.type == "cpu":
        return torch.from_numpy(allowed)
    packed = to_device(torch.from_numpy(np.packbits(allowed, 1, bitorder="little")), device)
    bits = packed[..., None] >> torch.arange(8, dtype=torch.uint8, device=device) & 1
    return bits.flatten(1)[:, : allowed.shape[1]].bool()


class LogitsProcessor:
    """The logits processing of one request, with the token counts that it needs."""

    def __init__(
        self, params: SamplingParams, prompt: Ints, stop_ids: Collection[int], vocabulary: int, device: torch.device
    ) -> None:
        self._params = params
        self._counts = TokenCounts(prompt, vocabulary, device) if params.penalizes else None
        self._bias_ids = torch.tensor(list(params.logit_bias), dtype=torch.long, device=device)
        self._bias = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32, device=device)
        stops = sorted({token for token in stop_ids if token < vocabulary})
        if len(stops) == vocabulary:
            stops = []  # masking them would leave no token
        self._stop_ids = torch.tensor(stops, dtype=torch.long, device=device)

    def commit(self, tokens: Ints) -> None:
        """Counts emitted tokens, int32 [A]."""
        if self._counts is not None:
            self._counts.add(tokens)

    def adjust(self, logits: torch.Tensor, tree: DraftTree, rows: slice, emitted: int) -> torch.Tensor:
        """Penalties, biases and the minimum length, for logits [M, V] of M `rows`, after `emitted` tokens of answer."""
        if not self._params.adjusts:
            return logits
        logits = logits.to(torch.float32, copy=True)
        if self._counts is not None:
            self._penalize(logits, self._counts, tree, rows)
        if self._params.logit_bias:
            logits.index_add_(1, self._bias_ids, self._bias.expand(len(logits), -1))
        if len(self._stop_ids) and emitted < self._params.min_tokens:
            early = np.flatnonzero(np.append(0, tree.depths)[rows] < self._params.min_tokens - emitted)
            index = to_device(torch.from_numpy(early), logits.device)[:, None]
            logits.index_put_((index, self._stop_ids), logits.new_full((), -torch.inf))
        return logits

    def _penalize(self, logits: torch.Tensor, occurred: TokenCounts, tree: DraftTree, rows: slice) -> None:
        """Presence and frequency penalties count the answer (OpenAI), repetition also the prompt (CTRL, arXiv 1909.05858).

        Changes float32 logits [M, V] in place, only at tokens that have occurred.
        """
        params = self._params
        ids, counts = occurred.along(tree, rows)
        values = logits.index_select(1, ids)
        if params.repetition_penalty != 1.0:
            factor = min(max(params.repetition_penalty, MIN_FACTOR), MAX_FACTOR)
            repeated = torch.where(values > 0, values / factor, values * factor)
            seen = counts > 0
            seen[:, : len(occurred)] = True
            values = torch.where(seen, repeated, values)
        if params.frequency_penalty or params.presence_penalty:
            values -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
        logits.index_copy_(1, ids, values)


class TokenCounts:
    """How often each token occurs in the answer, for the T tokens of prompt and answer only."""

    def __init__(self, prompt: Ints, vocabulary: int, device: torch.device) -> None:
        ids = np.unique(prompt).astype(np.int64)
        self._entry = np.full(vocabulary, -1, np.int64)  # index of each token in `_ids`, -1 = none
        self._entry[ids] = np.arange(len(ids))
        self._ids = to_device(torch.from_numpy(ids), device)  # [T]
        self._counts = torch.zeros(len(ids), device=device)  # [T]

    def __len__(self) -> int:
        return len(self._ids)

    def add(self, tokens: Ints) -> None:
        """Counts tokens of the answer, int32 [A]."""
        new = np.unique(tokens[self._entry[tokens] < 0]).astype(np.int64)
        self._entry[new] = np.arange(len(new)) + len(self)
        self._ids, self._counts = self._with(new)
        entries = to_device(torch.from_numpy(self._entry[tokens]), self._ids.device)
        self._counts.index_add_(0, entries, torch.ones_like(entries, dtype=torch.float32))

    def along(self, tree: DraftTree, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids, int64 [T + new], and their occurrences in the answer and on the path of each of M rows, float32 [M, T + new].

        The last of the ids are those that occur in the tree alone.
        """
        on_path = tree.ancestors[rows, 1:]
        row, node = np.nonzero(on_path)
        if not len(node):
            return self._ids, self._counts.expand(len(on_path), -1)
        tokens = tree.tokens[node]
        entry = self._entry[tokens]
        new = np.unique(tokens[entry < 0]).astype(np.int64)
        entry = np.where(entry < 0, len(self) + np.searchsorted(new, tokens), entry)
        ids, counts = self._with(new)
        index = to_device(torch.from_numpy(np.stack([row, entry])), ids.device)
        counts = counts.repeat(len(on_path), 1)
        counts.index_put_((index[0], index[1]), torch.ones(len(row), device=ids.device), accumulate=True)
        return ids, counts

    def _with(self, new: NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
        """The ids and counts, followed by those of new tokens."""
        if not len(new):
            return self._ids, self._counts
        added = to_device(torch.from_numpy(new), self._ids.device)
        return torch.cat([self._ids, added]), torch.cat([self._counts, torch.zeros_like(added, dtype=torch.float32)])
