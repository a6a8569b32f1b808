"""The verifier of a session: its text, the cached rows of the text, and the target's verdicts on draft trees.

The cache holds all committed tokens but the last, which is the root of the next forward. Knows nothing about drafters.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from collections.abc import Sequence as Listed
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from outrider.drafters.interface import DraftTree, Ints, Logprobs, Verdict
from outrider.drafters.sequence import Reader, Sequence
from outrider.verify.model.batch import ForwardBatch, Segment
from outrider.verify.model.cache.kv_cache import KVCache, Rows, SwappedRows
from outrider.verify.model.runner import ModelRunner
from outrider.verify.sampling.acceptance import Decision, decide
from outrider.verify.sampling.logits import LogitsProcessor, ProcessedLogits
from outrider.verify.sampling.rows import Logits, in_place
from outrider.verify.sampling.topk import likeliest, logprobs_of
from outrider.verify.sampling_params import SamplingParams

if TYPE_CHECKING:
    from outrider.verify.model.adapter import Adapter
    from outrider.verify.model.pictures import Picture
    from outrider.verify.sampling.device import Together

PREFILL_CHUNK_TOKENS = 512
SCORED_CHUNK_TOKENS = 64  # prompt log-probabilities need a row of logits per token


class CachedText(Sequence):
    """A session's text, and where the keys and values of its tokens are."""

    rows: Rows | None = None  # a KVCache; copies of its rows while the session has none; None = the text has been dropped

    @property
    def cache(self) -> KVCache | None:
        """The cache, unless the session is swapped out."""
        return self.rows if isinstance(self.rows, KVCache) else None


@dataclass(frozen=True, eq=False)
class Judgement:
    """A tree that is being judged: a device may still compute the decision."""

    tree: DraftTree
    logits: Logits  # [N+1, V]
    decision: Callable[[], Decision]  # waits for it
    logprobs: int | None  # as in SamplingParams

    def verdict(self) -> Verdict:
        """Waits for the verdict. Raises ModelError if the logits are not finite."""
        path, tokens, (ids, probabilities) = self.decision()
        logprobs = None
        if self.logprobs is not None:
            logprobs = logprobs_of(self.logits[[0, *(path + 1).tolist()]], tokens, self.logprobs)
        return Verdict(self.tree, path, tokens, ids, probabilities, logprobs=logprobs)


class Verifier:
    """Decides the next tokens of a session's requests, with a forward of the target.

    Calls come in the order begin, (chunk, commit_chunk)*, (segment, judge, commit)*. Between two of them, the session may be
    swapped out and in again. Callers enforce the context limit.
    """

    def __init__(self, runner: ModelRunner, cache: KVCache | None) -> None:
        self.runner = runner
        self.sequence = CachedText()  # only the verifier changes it
        self.sequence.rows = cache
        self._reader = Reader()
        self._params = SamplingParams()
        self._processor: LogitsProcessor | None = None
        self._adapter: Adapter | None = None
        self._pictures: Listed[Picture] = ()  # of the request's prompt, in its order
        self._prompt_logprobs: list[Logprobs] | None = None  # one entry per prompt chunk; None if not requested

    @classmethod
    def restored(cls, runner: ModelRunner, text: Ints, prompt_length: int, rows: Rows) -> Verifier:
        """A verifier of a text (int32 [N]) that is swapped out to `rows`."""
        verifier = cls(runner, None)
        verifier.sequence.begin(text[:prompt_length])
        verifier._reader.begin(verifier.sequence)
        verifier.sequence.append(text[prompt_length:])
        verifier.sequence.rows = rows
        return verifier

    def clone(self, slot: KVCache, length: int) -> Verifier:
        """A verifier of the text's first `length` tokens, with a copy of their committed rows in `slot`."""
        other = Verifier(self.runner, slot)
        other.sequence = self.sequence.clone(length)
        other.sequence.rows = slot
        other._reader.resume(other.sequence, self._reader.known)
        slot.fork(self.rows, length)
        return other

    @property
    def rows(self) -> Rows:
        assert self.sequence.rows is not None
        return self.sequence.rows

    @property
    def cache(self) -> KVCache:
        """The committed keys and values on the device."""
        assert self.sequence.cache is not None, "a session that is swapped out must be swapped in first"
        return self.sequence.cache

    @property
    def committed_rows(self) -> int:
        return self.rows.length

    @property
    def is_swapped_out(self) -> bool:
        """Whether the committed rows are in host memory."""
        return self.sequence.rows is not None and self.sequence.cache is None

    def swap_out(self) -> KVCache:
        """Moves the committed rows to host memory and returns the slot. Call `swap_in` before anything else."""
        slot = self.cache
        self.sequence.rows = slot.swap_out()
        return slot

    def swap_in(self, slot: KVCache) -> None:
        """Restores the committed rows into a slot after `swap_out`."""
        assert self.is_swapped_out
        slot.fork(self.rows, self.rows.length)
        self.sequence.rows = slot

    def drop_rows(self) -> KVCache | None:
        """Drops the committed rows between two steps; returns the slot, if there is one. `chunk` reads them after `swap_in`."""
        slot, self.sequence.rows = self.sequence.cache, SwappedRows([], 0, [])
        if self._reads_for_logprobs:
            self._prompt_logprobs = []
        if slot is not None:
            slot.truncate(0)
        return slot

    def release(self) -> KVCache | None:
        """Drops the text; returns the slot, if there is one."""
        slot, self.sequence.rows = self.sequence.cache, None
        self.sequence.truncate(0)
        if slot is not None:
            slot.truncate(0)
        return slot

    def begin(
        self,
        prompt: Ints,
        params: SamplingParams,
        max_tokens: int,
        stop_ids: Collection[int] = (),
        wants_prompt_logprobs: bool = False,
        adapter: Adapter | None = None,
        pictures: Listed[Picture] = (),
    ) -> int:
        """Starts a request; returns the number of prompt tokens that are in the cache already.

        With `wants_prompt_logprobs`, the prompt's log-probabilities are computed, and therefore all of it is read. All requests
        of a session have the same adapter.
        """
        self._params, self._adapter, self._pictures = params, adapter, pictures
        self._processor = LogitsProcessor(params, self._as_model_reads(prompt), stop_ids, self.runner.vocabulary)
        self._prompt_logprobs = [] if wants_prompt_logprobs else None
        self.sequence.begin(prompt, max_tokens, stop_ids)
        known = self._reader.begin(self.sequence)
        self._truncate_cache(0 if wants_prompt_logprobs else min(known, len(prompt) - 1))
        return self.cache.length

    @property
    def unread_prompt(self) -> int:
        """The number of the text's tokens that are not in the cache, without its last one, which is the next step's root.

        They are the prompt's, and after `drop_rows` the answer's, too.
        """
        return max(0, len(self.sequence) - 1 - self.cache.length)

    def chunk(self, tokens: int = PREFILL_CHUNK_TOKENS) -> Segment | None:
        """The next chunk of the text; None once all is read. It is at most `tokens` long, or one picture."""
        start, with_logits = self.cache.length, self._reads_for_logprobs
        end = self.sequence.prompt_length - 1 if with_logits else len(self.sequence) - 1
        tokens = min(tokens, SCORED_CHUNK_TOKENS) if with_logits else tokens
        picture = next((each for each in self._pictures if each.end > start), None)
        if picture is not None and picture.start == start:
            return Segment(self.cache, ForwardBatch.chain(picture.tokens), False, self._adapter, self._shift, picture)
        if picture is not None:
            end = min(end, picture.start)
        part = self.sequence.tokens[start:end][:tokens]
        if not len(part):
            return None
        return Segment(self.cache, ForwardBatch.chain(part), with_logits, self._adapter, self._shift)

    def commit_chunk(self, chunk: Segment, logits: Logits) -> None:
        """Keeps the rows of a chunk after its forward, and the log-probabilities of its tokens if they are requested."""
        start = self.cache.length
        if chunk.logits:
            assert self._prompt_logprobs is not None
            following = self.sequence.tokens[start + 1 :][: chunk.rows]
            self._prompt_logprobs.append(logprobs_of(in_place(logits), following, self._params.logprobs or 0))
        self.cache.length += chunk.rows

    @property
    def _reads_for_logprobs(self) -> bool:
        """Whether log-probabilities of the prompt's tokens are requested and missing."""
        found = self._prompt_logprobs
        return found is not None and sum(len(part.chosen) for part in found) < self.sequence.prompt_length - 1

    @property
    def prompt_logprobs(self) -> Logprobs | None:
        """Log-probabilities of the prompt tokens read so far except the first, [P-1]; None if not requested."""
        if self._prompt_logprobs is None:
            return None
        empty = logprobs_of(
            np.empty((0, self.runner.vocabulary), np.float32), np.empty(0, np.int32), self._params.logprobs or 0
        )
        parts = [empty, *self._prompt_logprobs]
        return Logprobs(*(np.concatenate([getattr(part, entry.name) for part in parts]) for entry in fields(Logprobs)))

    def segment(self, tree: DraftTree) -> Segment:
        """The rows of a step: the root and the tree."""
        batch = ForwardBatch.tree(int(self.sequence.tokens[-1]), tree)
        return Segment(self.cache, batch, adapter=self._adapter, shift=self._shift)

    def judge(
        self,
        tree: DraftTree,
        logits: Logits,
        feedback: int = 0,
        allowed: NDArray[np.bool_] | None = None,
        together: Together | None = None,
    ) -> Judgement:
        """Starts to judge a tree after its forward, by its logits [N+1, V].

        The verdict holds the target's `feedback` likeliest tokens at every node, and emits only tokens in `allowed` [N+1, V].
        """
        assert self._processor is not None
        position, rows = self.sequence.emitted, in_place(logits)  # the position of the next token in the answer
        processed = ProcessedLogits(self._processor, rows, tree, position, allowed)
        decision = decide(self._params, processed, tree, position, likeliest(rows, feedback, together), together)
        return Judgement(tree, rows, decision, self._params.logprobs)

    def commit(self, verdict: Verdict) -> None:
        """Appends a verdict's tokens to the text. The verdict may have been cut."""
        assert self._processor is not None
        self.cache.commit([0, *(verdict.path[: len(verdict.tokens) - 1] + 1).tolist()])
        self._processor.commit(verdict.tokens)
        self.sequence.append(verdict.tokens)

    def truncate(self, length: int) -> None:
        """Drops the committed tokens from position `length` on."""
        self.sequence.truncate(length)
        self._truncate_cache(max(0, length - 1))

    def _truncate_cache(self, length: int) -> None:
        """Truncates the cache to at most this length, and to no part of a picture."""
        self.cache.truncate(length)
        for picture in reversed(self._pictures):
            if picture.start < self.cache.length < picture.end:
                self.cache.truncate(picture.start)

    @property
    def _shift(self) -> int:
        """`Segment.shift` of the next rows."""
        return sum(len(each.tokens) - each.advance for each in self._pictures if each.end <= self.cache.length)

    def _as_model_reads(self, prompt: Ints) -> Ints:
        """The prompt with the tokens of the model's processor where its pictures are."""
        if not self._pictures:
            return prompt
        prompt = prompt.copy()
        for picture in self._pictures:
            prompt[picture.start : picture.end] = picture.tokens.numpy()
        return prompt
