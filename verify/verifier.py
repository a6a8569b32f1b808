"""The verifier: one target forward over a draft tree, one acceptance rule, one verdict.

Keeps a session's text and its KV cache in sync: the cache holds all committed tokens but the last, which is the root of the
next forward.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from dataclasses import fields
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.drafters.interface import DraftTree, Ints, Logprobs, Verdict
from outrider.drafters.sequence import Reader, Sequence
from outrider.verify.acceptance import rule_of
from outrider.verify.largest import likeliest
from outrider.verify.logits import LogitsProcessor, ProcessedLogits
from outrider.verify.model.batch import ForwardBatch
from outrider.verify.model.cache.kv_cache import KVCache
from outrider.verify.model.cache.paging import Rows, SwappedRows
from outrider.verify.model.runner import ModelRunner
from outrider.verify.model.segment import Forwards, Segment
from outrider.verify.sampling_params import SamplingParams

PREFILL_CHUNK_TOKENS = 512
SCORED_CHUNK_TOKENS = 64  # prompt log-probabilities need a row of logits per token


class Verifier(Protocol):
    """Decides a request's next tokens. Calls come in the order begin, (chunk, read)*, (segment, judge, commit)*."""

    sequence: Sequence  # the session's text; only the verifier changes it

    @property
    def runner(self) -> Forwards:
        """Computes segments."""

    @property
    def context_tokens(self) -> int:
        """The maximum length of prompt and answer in tokens."""

    @property
    def draft_depth(self) -> int:
        """The deepest node that the next draft may have."""

    @property
    def prompt_logprobs(self) -> Logprobs | None:
        """Log-probabilities of the prompt tokens read so far except the first, [P-1]; None if not requested."""

    def begin(
        self, prompt: Ints, params: SamplingParams, max_tokens: int, stop_ids: Collection[int] = (), scores: bool = False
    ) -> int:
        """Starts a request; returns the number of prompt tokens that are in the cache already.

        With `scores`, the prompt's log-probabilities are computed, and therefore all of it is read.
        """

    @property
    def unread(self) -> int:
        """The number of the text's tokens that are not in the cache, without its last one, which is the next step's root.

        They are the prompt's, and after `drop_rows` the answer's, too.
        """

    def chunk(self, tokens: int = PREFILL_CHUNK_TOKENS) -> Segment | None:
        """The next unread part of the text, at most `tokens` long; None once all is read."""

    def read(self, chunk: Segment, logits: torch.Tensor) -> None:
        """Records a part of the text as read, after its forward."""

    def segment(self, tree: DraftTree) -> Segment:
        """The rows of a step: the root and the tree."""

    def judge(
        self, tree: DraftTree, logits: torch.Tensor, feedback: int = 0, allowed: NDArray[np.bool_] | None = None
    ) -> Verdict:
        """The verdict on a tree after its forward, from its logits [N+1, V].

        Holds the target's `feedback` likeliest tokens at every node. Emits only tokens in `allowed` [N+1, V].
        """

    def commit(self, verdict: Verdict) -> None:
        """Appends a verdict's tokens to the text. The verdict may have been cut."""

    def truncate(self, length: int) -> None:
        """Drops the committed tokens from position `length` on."""


class TreeVerifier:
    """Verifies with a ModelRunner. Implements `Verifier`. Callers enforce the context limit."""

    def __init__(self, runner: ModelRunner, cache: KVCache | None) -> None:
        self.sequence = Sequence()
        self._reader = Reader()
        self.runner = runner
        self._slot: KVCache | None = cache
        self._swapped: Rows | None = None
        self._params = SamplingParams()
        self._rule = rule_of(self._params)
        self._processor: LogitsProcessor | None = None
        self._scores: list[Logprobs] | None = None  # per prompt chunk, if requested

    def swap_out(self) -> KVCache:
        """Moves the committed rows to host memory and returns the slot. Call `swap_in` before anything else."""
        assert self._slot is not None
        slot, self._swapped, self._slot = self._slot, self._slot.swap_out(), None
        return slot

    def swap_in(self, slot: KVCache) -> None:
        """Restores the committed rows into a slot after `swap_out`."""
        assert self._swapped is not None
        slot.fork(self._swapped, self._swapped.length)
        self._slot, self._swapped, self.sequence.cache = slot, None, slot

    def drop_rows(self) -> KVCache | None:
        """Drops the committed rows between two steps; returns the slot, if there is one. `chunk` reads them after `swap_in`."""
        slot, self._slot, self._swapped = self._slot, None, SwappedRows([], 0, [])
        if self._is_scoring:
            self._scores = []
        if slot is not None:
            slot.truncate(0)
        return slot

    @classmethod
    def restored(cls, runner: ModelRunner, text: Ints, prompt_length: int, rows: Rows) -> TreeVerifier:
        """A verifier of a text (int32 [N]) that is swapped out to `rows`."""
        verifier = cls(runner, None)
        verifier.sequence.begin(text[:prompt_length])
        verifier._reader.begin(verifier.sequence)
        verifier.sequence.append(text[prompt_length:])
        verifier._swapped = rows
        return verifier

    def fork(self, slot: KVCache, length: int, memo: dict[int, Any]) -> TreeVerifier:
        """A verifier of the first `length` tokens of the text, whose cache is `slot` with the committed rows of these.

        `memo` is that of `copy.deepcopy`: with it, copies of the text's readers read the copy of the text.
        """
        forked = TreeVerifier(self.runner, slot)
        if self.sequence.cache is not None:
            memo[id(self.sequence.cache)] = slot  # not copied
        forked.sequence = copy.deepcopy(self.sequence, memo)
        forked.sequence.truncate(length)
        forked._reader = copy.deepcopy(self._reader, memo)
        slot.fork(self.rows, length)
        return forked

    @property
    def rows(self) -> Rows:
        """The committed keys and values."""
        source = self._slot or self._swapped
        assert source is not None
        return source

    def release(self) -> KVCache | None:
        """Drops the text; returns the slot, if there is one."""
        slot, self._slot, self._swapped = self._slot, None, None
        self.sequence.truncate(0)
        if slot is not None:
            slot.truncate(0)
        return slot

    @property
    def committed_rows(self) -> int:
        """The number of tokens in the cache."""
        return self.rows.length

    @property
    def is_swapped_out(self) -> bool:
        """Whether the committed rows are in host memory."""
        return self._swapped is not None

    @property
    def cache(self) -> KVCache:
        """The slot."""
        assert self._slot is not None, "a session that is swapped out must be swapped in first"
        return self._slot

    @property
    def context_tokens(self) -> int:
        return self.runner.context_tokens

    @property
    def draft_depth(self) -> int:
        return self.runner.draft_depth(self.committed_rows)

    def begin(
        self, prompt: Ints, params: SamplingParams, max_tokens: int, stop_ids: Collection[int] = (), scores: bool = False
    ) -> int:
        self._params = params
        self._rule = rule_of(params)
        self._processor = LogitsProcessor(params, prompt, stop_ids, self.runner.vocabulary, self.runner.device)
        self._scores = [] if scores else None
        self.sequence.begin(prompt, max_tokens, stop_ids)
        known = self._reader.begin(self.sequence)
        self.cache.truncate(0 if scores else min(known, len(prompt) - 1))
        self.sequence.cache = self.cache
        return self.cache.length

    @property
    def unread(self) -> int:
        return max(0, len(self.sequence) - 1 - self.cache.length)

    def chunk(self, tokens: int = PREFILL_CHUNK_TOKENS) -> Segment | None:
        start, scores = self.cache.length, self._is_scoring
        end = self.sequence.prompt_length - 1 if scores else len(self.sequence) - 1
        part = self.sequence.tokens[start:end][: min(tokens, SCORED_CHUNK_TOKENS) if scores else tokens]
        if not len(part):
            return None
        return Segment(self.cache, ForwardBatch.chain(torch.from_numpy(part.astype(np.int64))), logits=scores)

    def read(self, chunk: Segment, logits: torch.Tensor) -> None:
        start = self.cache.length
        if chunk.logits:
            assert self._scores is not None
            following = self.sequence.tokens[start + 1 :][: chunk.rows]
            self._scores.append(_logprobs(logits, following, self._params.logprobs or 0))
        self.cache.length += chunk.rows

    def prefill(self) -> None:
        """Reads the whole prompt."""
        while (chunk := self.chunk()) is not None:
            self.read(chunk, self.runner.forward_all([chunk])[0])

    @property
    def _is_scoring(self) -> bool:
        """Whether log-probabilities of the prompt's tokens are missing."""
        return self._scores is not None and sum(len(part.chosen) for part in self._scores) < self.sequence.prompt_length - 1

    @property
    def prompt_logprobs(self) -> Logprobs | None:
        if self._scores is None:
            return None
        empty = _logprobs(torch.empty(0, self.runner.vocabulary), np.empty(0, np.int32), self._params.logprobs or 0)
        parts = [empty, *self._scores]
        return Logprobs(*(np.concatenate([getattr(part, entry.name) for part in parts]) for entry in fields(Logprobs)))

    def segment(self, tree: DraftTree) -> Segment:
        return Segment(self.cache, ForwardBatch.tree(int(self.sequence.tokens[-1]), tree))

    def judge(
        self, tree: DraftTree, logits: torch.Tensor, feedback: int = 0, allowed: NDArray[np.bool_] | None = None
    ) -> Verdict:
        assert self._processor is not None
        position = self.sequence.emitted  # of the next token in the answer
        processed = ProcessedLogits(self._processor, logits, tree, position, allowed)
        rows, tokens, (ids, probabilities) = self._rule.decide(processed, tree, position, likeliest(logits, feedback))
        count = self._params.logprobs
        logprobs = None if count is None else _logprobs(logits[[0, *(rows + 1).tolist()]], tokens, count)
        return Verdict(tree, rows, tokens, ids, probabilities, logprobs=logprobs)

    def verify(self, tree: DraftTree, feedback: int = 0, allowed: NDArray[np.bool_] | None = None) -> Verdict:
        """`judge` after a forward of this step alone."""
        return self.judge(tree, self.runner.forward_all([self.segment(tree)])[0], feedback, allowed)

    def commit(self, verdict: Verdict) -> None:
        assert self._processor is not None
        self.cache.commit([0, *(verdict.rows[: len(verdict.tokens) - 1] + 1).tolist()])
        self._processor.commit(verdict.tokens)
        self.sequence.append(verdict.tokens)

    def truncate(self, length: int) -> None:
        self.sequence.truncate(length)
        self.cache.truncate(max(0, length - 1))


def _logprobs(logits: torch.Tensor, tokens: Ints, count: int) -> Logprobs:
    """Log-probabilities of `tokens` [A+1] and of the `count` likeliest tokens, one per row of `logits` [A+1, V]."""
    values = logits.float().log_softmax(-1)
    chosen = values.gather(1, torch.from_numpy(tokens).long().to(values.device)[:, None])[:, 0]
    top, ids = values.topk(count, -1)
    return Logprobs(chosen.cpu().numpy(), ids.int().cpu().numpy(), top.cpu().numpy())
