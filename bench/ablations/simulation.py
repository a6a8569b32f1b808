"""PEARL's loop over two models that only sleep.

A draft token is right with probability a, independently, and c tokens are drafted in the time of a verification.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.drafters.interface import DraftTree, Ints, Logprobs, Sampling, Verdict
from outrider.drafters.model.language_model import Candidates
from outrider.drafters.model.pearl import PearlDrafter
from outrider.drafters.options import PearlOptions
from outrider.drafters.sequence import Sequence
from outrider.verify.decode import finish
from outrider.verify.model.batch import ForwardBatch
from outrider.verify.model.cache.shape import CacheShape
from outrider.verify.model.cache.tensor_cache import TensorCache
from outrider.verify.model.runner import ModelRunner
from outrider.verify.model.segment import Segment
from outrider.verify.sampling.acceptance import walk
from outrider.verify.sampling_params import SamplingParams
from outrider.verify.stream import DecodeOptions, Stream
from outrider.verify.verifier import CachedText, Verifier

T = TypeVar("T")
SHAPE = CacheShape.uniform(1, 1, 1, torch.float32, torch.device("cpu"))
NO_ROWS = Segment(TensorCache(SHAPE, 1), ForwardBatch.chain(torch.zeros(1)))
WRONG = 1  # added to a token, to be rejected


def agreement(rate: float, tokens: int, seed: int) -> NDArray[np.bool_]:
    """Where the draft model is right, bool [tokens]: exactly a share `rate` of the positions, in random order."""
    right = np.arange(tokens) < round(rate * tokens)
    np.random.default_rng(seed).shuffle(right)
    return right


def with_errors(answer: Ints, right: NDArray[np.bool_]) -> Ints:
    """`answer` with wrong tokens wherever `right` is false, int32 [tokens]. All tokens of `answer` must be even."""
    return np.where(right, answer, answer + WRONG).astype(np.int32)


class SleepingModel:
    """A draft model that sleeps for each forward and returns given guesses. Implements `LanguageModel`."""

    vocabulary = 1 << 18

    def __init__(self, guesses: Ints, seconds: float, ratio: float) -> None:
        self._guesses = guesses
        self._seconds = seconds
        self.speed_ratio = ratio
        self._emitted = 0
        self._rows = 0  # drafted rows, the root not counted
        self._thread = ThreadPoolExecutor(1)

    def begin(self, text: Sequence, sampling: Sampling | None = None) -> None:
        self._emitted, self._rows = text.emitted, 0  # a request may begin after its first tokens

    @property
    def space(self) -> int:
        return len(self._guesses) - self._emitted - self._rows - 1

    def root(self, count: int) -> Candidates:
        self._rows = 0
        return self._forward(1)

    def expand(self, tokens: Collection[int], parents: Collection[int], count: int) -> Candidates:
        self._rows += len(tokens)
        return self._forward(len(tokens))

    def retract(self, rows: int) -> None:
        self._rows = rows - 1

    def advance(self, tokens: Ints) -> None:
        self._emitted += len(tokens)
        self._rows = max(0, self._rows - len(tokens))

    def submit(self, work: Callable[[], T]) -> Future[T]:
        return self._thread.submit(work)

    def _forward(self, rows: int) -> Candidates:
        time.sleep(self._seconds)
        end = self._emitted + self._rows + 1
        return Candidates(self._guesses[end - rows : end, None], np.full((rows, 1), 0.5, np.float32))


class SleepingVerifier(Verifier):
    """A target that sleeps for each step and emits a given answer. Needs no model."""

    context_tokens = draft_depth = 1 << 30
    prompt_logprobs: Logprobs | None = None
    unread_prompt, takes_trees = 0, True

    def __init__(self, answer: Ints, seconds: float) -> None:
        self.runner = cast(ModelRunner, self)
        self.sequence = CachedText()
        self._answer = answer
        self._seconds = seconds

    def begin(
        self, prompt: Ints, params: SamplingParams, max_tokens: int, stop_ids: Collection[int] = (), *_: Any, **__: Any
    ) -> int:
        self.sequence.begin(prompt, max_tokens, stop_ids)
        return 0

    def chunk(self, tokens: int = 0) -> Segment | None:
        return None

    def commit_chunk(self, chunk: Segment, logits: Any) -> None:
        pass

    def segment(self, tree: DraftTree) -> Segment:
        return NO_ROWS

    def forward_all(self, segments: Sized) -> list[torch.Tensor]:
        time.sleep(self._seconds)
        return [torch.empty(0)] * len(segments)

    def judge(
        self, tree: DraftTree, logits: Any, feedback: int = 0, allowed: NDArray[np.bool_] | None = None
    ) -> Callable[[], Verdict]:
        choices = self._answer[self.sequence.emitted :][[0, *tree.depths.tolist()]]
        rows, tokens = walk(tree, choices.tolist().__getitem__)
        return lambda: Verdict(tree, rows, tokens)

    def commit(self, verdict: Verdict) -> None:
        self.sequence.append(verdict.tokens)

    def truncate(self, length: int) -> None:
        self.sequence.truncate(length)


def run_loop(ratio: int, rate: float, tokens: int, token_seconds: float, window: int) -> tuple[PearlDrafter, float]:
    """Decodes a random answer. Returns the drafter and the seconds."""
    margin = 2 * max(window, ratio) + 2  # positions that may be drafted but not reached
    answer = 2 * np.random.default_rng(1).integers(0, 1000, tokens + margin).astype(np.int32)  # odd tokens are wrong
    right = np.pad(agreement(rate, tokens, seed=ratio), (0, margin), constant_values=True)
    model = SleepingModel(with_errors(answer, right), token_seconds, ratio)
    drafter = PearlDrafter(model, PearlOptions(window=window, ahead=0))
    options = DecodeOptions(SamplingParams(temperature=0), tokens, max_nodes=window)
    started = time.perf_counter()
    decoded = finish(Stream(SleepingVerifier(answer, ratio * token_seconds), drafter, np.zeros(1, np.int32), options))
    seconds = time.perf_counter() - started
    assert decoded.tokens == answer[:tokens].tolist()
    return drafter, seconds


def simulate(ratio: int, rate: float, tokens: int, token_seconds: float, window: int) -> float:
    """Tokens per second of PEARL's loop with this window."""
    return round(tokens / run_loop(ratio, rate, tokens, token_seconds, window)[1], 2)


def closed_form(ratio: int, rate: float, token_seconds: float, window: int) -> float:
    """Tokens per second of the same loop if drafting and verification wait for each other, as in the paper.

    A cycle emits 1 / (1 - a) tokens in 1 + a / (1 - a^g) phases of max(g, c) draft tokens (docs/papers.md).
    """
    phases = 1 + rate / (1 - rate**window)
    return 1 / (1 - rate) / (phases * max(window, ratio) * token_seconds)
