"""The verifier: one target forward over a whole draft tree, one rule, one verdict.

Holds the invariant that ties tokens to the cache: the cache holds all committed tokens but the last one, which is the
root of the next forward.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from dataclasses import fields
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from drafters.interface import DraftTree, Ints, Logprobs, Verdict
from verify.acceptance import rule_of
from verify.logits import LogitsProcessor
from verify.model.batch import ForwardBatch
from verify.model.cache import KVCache, SwappedRows
from verify.model.runner import ModelRunner
from verify.sampling_params import SamplingParams

PREFILL_CHUNK_TOKENS = 512
SCORED_CHUNK_TOKENS = 64  # a row of logits for each token is a lot of memory


class Verifier(Protocol):
    """Decides what a request's next tokens are."""

    @property
    def context_tokens(self) -> int:
        """How many tokens the context holds."""

    @property
    def space(self) -> int:
        """How many more tokens the context can hold after the committed ones."""

    @property
    def prompt_logprobs(self) -> Logprobs | None:
        """Of the prompt's tokens but the first, [P-1], as far as they are read; None where nobody asked."""

    def begin(self, prompt: Ints, params: SamplingParams, stop_ids: Collection[int] = (), scores: bool = False) -> int:
        """Starts a request; returns how many of the prompt's tokens need not be read again.

        With `scores`, `prefill` computes the prompt's log-probabilities, and so reads all of it.
        """

    def prefill(self, tokens: Ints) -> Iterator[int]:
        """Makes `tokens` (int32 [P], P >= 1) the committed text, chunk by chunk; yields the tokens done after each."""

    def verify(self, tree: DraftTree, feedback: int = 0, allowed: NDArray[np.bool_] | None = None) -> Verdict:
        """One target forward over the tree; commits the accepted path and emits one token more.

        The verdict holds the target's `feedback` likeliest tokens at every node. Only `allowed` tokens ([N+1, V]) are emitted.
        """

    def truncate(self, length: int) -> None:
        """Takes back committed tokens beyond `length` (a stop inside an accepted block)."""


class TreeVerifier:
    """Verifies with a ModelRunner. Implements `Verifier`. Raises nothing of its own: the caller keeps to the context."""

    def __init__(self, runner: ModelRunner, cache: KVCache) -> None:
        self._runner = runner
        self._slot: KVCache | None = cache
        self._swapped: SwappedRows | None = None
        self._params = SamplingParams()
        self._rule = rule_of(self._params)
        self._processor: LogitsProcessor | None = None
        self.tokens: list[int] = []  # the committed text
        self._prompt_length = 0
        self._scores: list[Logprobs] | None = None  # of the prompt's chunks, where they are asked for

    def swap_out(self) -> KVCache:
        """Puts the committed text's rows into host memory and gives the slot back; `resume` before anything else."""
        assert self._slot is not None
        slot, self._swapped, self._slot = self._slot, self._slot.swap_out(), None
        return slot

    def swap_in(self, slot: KVCache) -> None:
        """Goes on in another slot after `park`."""
        assert self._swapped is not None
        slot.swap_in(self._swapped)
        self._slot, self._swapped = slot, None

    def leave(self) -> KVCache | None:
        """Forgets everything; returns the slot, if it has one."""
        slot, self._slot, self._swapped = self._slot, None, None
        self.tokens = []
        if slot is not None:
            slot.truncate(0)
        return slot

    @property
    def is_swapped_out(self) -> bool:
        """Its rows are in host memory."""
        return self._swapped is not None

    @property
    def _cache(self) -> KVCache:
        assert self._slot is not None, "a parked session must be resumed first"
        return self._slot

    @property
    def context_tokens(self) -> int:
        return self._runner.context_tokens

    @property
    def space(self) -> int:
        return self._runner.context_tokens - len(self.tokens)

    def begin(self, prompt: Ints, params: SamplingParams, stop_ids: Collection[int] = (), scores: bool = False) -> int:
        self._params = params
        self._rule = rule_of(params)
        self._processor = LogitsProcessor(params, prompt, stop_ids, self._runner.vocabulary, self._runner.device)
        self._prompt_length = len(prompt)
        reused = 0 if scores else common_prefix(self.tokens, prompt.tolist())
        self._scores = [] if scores else None
        self._cache.truncate(min(reused, len(prompt) - 1))
        self.tokens = prompt.tolist()
        return self._cache.length

    def prefill(self, tokens: Ints) -> Iterator[int]:
        while self._cache.length < len(tokens) - 1:
            start, scores = self._cache.length, self._scores
            size = PREFILL_CHUNK_TOKENS if scores is None else SCORED_CHUNK_TOKENS
            chunk = tokens[start : len(tokens) - 1][:size]
            batch = ForwardBatch.chain(torch.from_numpy(chunk.astype(np.int64)))
            logits = self._runner.forward(self._cache, batch, logits=scores is not None)
            if scores is not None:
                scores.append(_logprobs(logits, tokens[start + 1 :][: len(chunk)], self._params.logprobs or 0))
            self._cache.length += len(chunk)
            yield self._cache.length

    @property
    def prompt_logprobs(self) -> Logprobs | None:
        if self._scores is None:
            return None
        empty = _logprobs(torch.empty(0, self._runner.vocabulary), np.empty(0, np.int32), self._params.logprobs or 0)
        parts = [empty, *self._scores]
        return Logprobs(*(np.concatenate([getattr(part, each.name) for part in parts]) for each in fields(Logprobs)))

    def verify(self, tree: DraftTree, feedback: int = 0, allowed: NDArray[np.bool_] | None = None) -> Verdict:
        started = time.perf_counter()
        logits = self._runner.forward(self._cache, ForwardBatch.tree(self.tokens[-1], tree))
        first = len(self.tokens) - self._prompt_length  # output position of the root's successor
        assert self._processor is not None
        likeliest = _likeliest(logits, feedback)
        wanted = self._processor(logits, tree, allowed)
        rows, tokens, (ids, probabilities) = self._rule.decide(wanted, tree, first, likeliest)
        self._processor.commit(tokens)
        count = self._params.logprobs
        logprobs = None if count is None else _logprobs(logits[[0, *(rows + 1).tolist()]], tokens, count)
        self._cache.commit([0, *(rows + 1).tolist()])
        self.tokens.extend(tokens.tolist())
        return Verdict(tree, rows, tokens, ids, probabilities, time.perf_counter() - started, logprobs)

    def truncate(self, length: int) -> None:
        del self.tokens[length:]
        self._cache.truncate(max(0, length - 1))


def _likeliest(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The target's own top tokens at every node, before any sampling rule: int32 ids and float32 shares, [N+1, count]."""
    if not count:
        return torch.empty(len(logits), 0, dtype=torch.int32), torch.empty(len(logits), 0)
    logits = logits.float()
    values, ids = logits.topk(count, -1)
    return ids.int(), (values - logits.logsumexp(-1, keepdim=True)).exp()


def _logprobs(logits: torch.Tensor, tokens: Ints, count: int) -> Logprobs:
    """Of `tokens` [A+1], each at its row of `logits` [A+1, V], and of the `count` likeliest ones there."""
    values = logits.float().log_softmax(-1)
    chosen = values.gather(1, torch.from_numpy(tokens).long().to(values.device)[:, None])[:, 0]
    top, ids = values.topk(count, -1)
    return Logprobs(chosen.cpu().numpy(), ids.int().cpu().numpy(), top.cpu().numpy())


def common_prefix(left: list[int], right: list[int]) -> int:
    """The length of the longest common prefix."""
    size = min(len(left), len(right))
    a, b = np.asarray(left[:size]), np.asarray(right[:size])
    different = np.flatnonzero(a != b)
    return int(different[0]) if len(different) else size
