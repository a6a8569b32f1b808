"""Logits processing before sampling: penalties, biases, minimum lengths and a grammar's masks.

All counts follow each node's own path, so a node of a draft tree is processed as plain decoding would process it. Knows
nothing about temperature or noise.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.drafters.interface import DraftTree, Ints
from outrider.verify.sampling.rows import Logits, float32, largest, uploaded, uploaded_masks, where
from outrider.verify.sampling_params import SamplingParams

# Beyond these bounds of a repetition penalty, scaled logits overflow float32.
MIN_FACTOR, MAX_FACTOR = 1e-30, 1e30


class ProcessedLogits:
    """The logits of a step's root and nodes, processed when they are read: an acceptance rule reads few of the rows."""

    def __init__(
        self,
        processor: LogitsProcessor,
        logits: Logits,  # [N+1, V]; the model's logits
        tree: DraftTree,
        emitted: int,  # tokens of the answer before the step
        allowed: NDArray[np.bool_] | None = None,  # [N+1, V]; a grammar's masks
    ) -> None:
        self._processor, self._logits, self._tree, self._emitted = processor, logits, tree, emitted
        self._allowed = allowed
        self.on_host = isinstance(logits, np.ndarray)

    def __getitem__(self, rows: int | slice) -> Any:
        """The logits [V] of the root (row 0) or of node `row - 1`, or those of several rows, [M, V]."""
        return self._process(rows) if isinstance(rows, slice) else self._process(slice(rows, rows + 1))[0]

    def _process(self, rows: slice) -> Any:
        """Logits [M, V] of M rows.

        In a row whose allowed tokens are all excluded by the other rules, only the grammar applies.
        """
        logits = self._logits[rows]
        adjusted = self._processor.adjust(logits, self._tree, rows, self._emitted)
        if self._allowed is None:
            return adjusted
        allowed = uploaded_masks(self._allowed[rows], logits)
        masked = where(allowed, adjusted, -np.inf)
        stuck = largest(masked) == -np.inf
        return where(stuck, where(allowed, logits, -np.inf), masked)


class LogitsProcessor:
    """The logits processing of one request, with the token counts that it needs."""

    def __init__(self, params: SamplingParams, prompt: Ints, stop_ids: Collection[int], vocabulary: int) -> None:
        self._params = params
        self._counts = TokenCounts(prompt, vocabulary) if params.penalizes else None
        self._bias_ids = np.array(list(params.logit_bias), np.int64)
        self._bias = np.array(list(params.logit_bias.values()), np.float32)
        stops = sorted({token for token in stop_ids if token < vocabulary})
        if len(stops) == vocabulary:
            stops = []  # masking them would leave no token
        self._stop_ids = np.array(stops, np.int64)

    def commit(self, tokens: Ints) -> None:
        """Counts emitted tokens, int32 [A]."""
        if self._counts is not None:
            self._counts.add(tokens)

    def adjust(self, logits: Any, tree: DraftTree, rows: slice, emitted: int) -> Any:
        """Applies penalties, biases and min_tokens to logits [M, V] of M `rows`; `emitted` answer tokens came before."""
        if not self._params.adjusts:
            return logits
        logits = float32(logits)
        if self._counts is not None:
            self._penalize(logits, self._counts, tree, rows)
        if self._params.logit_bias:
            ids = uploaded(self._bias_ids, logits)
            logits[:, ids] = logits[:, ids] + uploaded(self._bias, logits)
        if len(self._stop_ids) and emitted < self._params.min_tokens:
            early = np.append(0, tree.depths)[rows] < self._params.min_tokens - emitted
            ids, shown = uploaded(self._stop_ids, logits), uploaded(~early[:, None], logits)
            logits[:, ids] = where(shown, logits[:, ids], -np.inf)
        return logits

    def _penalize(self, logits: Any, occurred: TokenCounts, tree: DraftTree, rows: slice) -> None:
        """Presence and frequency penalties count the answer (OpenAI), repetition also the prompt (CTRL, arXiv 1909.05858).

        Changes float32 logits [M, V] in place, only at tokens that have occurred.
        """
        params = self._params
        ids, counts = occurred.along(tree, rows, logits)
        values = logits[:, ids]
        if params.repetition_penalty != 1.0:
            factor = min(max(params.repetition_penalty, MIN_FACTOR), MAX_FACTOR)
            repeated = where(values > 0, values / factor, values * factor)
            seen = counts > 0
            seen[:, : len(occurred)] = True
            values = where(seen, repeated, values)
        if params.frequency_penalty or params.presence_penalty:
            values = values - (params.frequency_penalty * counts + params.presence_penalty * (counts > 0))
        logits[:, ids] = values


class TokenCounts:
    """How often each token occurs in the answer, for the T tokens of prompt and answer only."""

    def __init__(self, prompt: Ints, vocabulary: int) -> None:
        self._ids = np.unique(prompt).astype(np.int64)  # [T]
        self._counts = np.zeros(len(self._ids), np.float32)  # [T]
        self._entry = np.full(vocabulary, -1, np.int64)  # index of each token in `_ids`, -1 = none
        self._entry[self._ids] = np.arange(len(self._ids))

    def __len__(self) -> int:
        return len(self._ids)

    def add(self, tokens: Ints) -> None:
        """Counts tokens of the answer, int32 [A], one by one: they are few."""
        for token in tokens.tolist():
            if self._entry[token] < 0:
                self._entry[token] = len(self)
                self._ids, self._counts = self._with(np.array([token]))
            self._counts[self._entry[token]] += 1.0

    def along(self, tree: DraftTree, rows: slice, logits: Any) -> tuple[Any, Any]:
        """Ids, int64 [T + new], and their occurrences in the answer and on the path of each of M rows, float32 [M, T + new].

        The last of the ids are those that occur in the tree alone. Both are where the logits are.
        """
        on_path = tree.ancestors[rows, 1:]
        row, node = np.nonzero(on_path)
        tokens = tree.tokens[node]
        entry = self._entry[tokens]
        new = np.unique(tokens[entry < 0]).astype(np.int64)
        ids, before = self._with(new)
        # One row and the few counts of the tree, since all rows would be much to upload.
        counts = uploaded(before, logits)[None] + uploaded(np.zeros((len(on_path), 1), np.float32), logits)
        if len(node):
            entry = np.where(entry < 0, len(self) + np.searchsorted(new, tokens), entry)
            places, times = np.unique(row * len(ids) + entry, return_counts=True)
            at_row, at_id = uploaded(places // len(ids), logits), uploaded(places % len(ids), logits)
            counts[at_row, at_id] = counts[at_row, at_id] + uploaded(times.astype(np.float32), logits)
        return uploaded(ids, logits), counts

    def _with(self, new: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The ids and counts, followed by those of new tokens."""
        return np.concatenate([self._ids, new]), np.concatenate([self._counts, np.zeros(len(new), np.float32)])
