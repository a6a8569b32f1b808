"""A draft model at work: a small model's runner, shared, and each session's own cache and rows below its text.

Promises that what a session's cache holds is never computed twice: accepted rows are committed where they stand, and a
request's prompt is read from where it differs. Draws with the target's own noise, so a sampled draft is what the target
would have chosen had it agreed on the probabilities (Gumbel coupling; Daliri et al., arXiv 2408.07978).
"""

from __future__ import annotations

import statistics
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray

from drafters.interface import MAX_NODES, Floats, Ints, Sampling
from drafters.model.language_model import Candidates
from drafters.sequence import common_prefix
from verify.cost import timed_forward
from verify.model.cache import KVCache
from verify.model.runner import ModelRunner
from verify.sampling import Sampler, warp_logits
from verify.sampling_params import SamplingParams
from verify.verifier import PREFILL_CHUNK_TOKENS

T = TypeVar("T")
TIMED_STEPS = 15
INDEPENDENT = 0x5851F42D4C957F2D  # makes another stream of noise of a seed


class DraftRunner:
    """What sessions share of a draft model: the runner, its thread, and as many caches as are wanted at once."""

    def __init__(self, runner: ModelRunner, vocabulary: int, slots: int = 4, threads: int = 1) -> None:
        """`vocabulary` is the target's, as its logits have it; token ids beyond the smaller one of both are never drafted."""
        self.runner = runner
        self.vocabulary = vocabulary
        self.shared_vocabulary = min(vocabulary, runner.vocabulary)
        self.speed_ratio = 1.0
        self._slots = slots
        self._lent: OrderedDict[SessionDraft, KVCache] = OrderedDict()  # least recently used first
        self._thread = ThreadPoolExecutor(1, "outrider-draft", initializer=self._prepare, initargs=(threads,))

    def _prepare(self, threads: int) -> None:
        """Of the model's thread: its cores on a CPU, a stream of its own on a GPU."""
        torch.set_num_threads(threads)  # holds for the calling thread
        if self.runner.device.type == "cuda":
            torch.cuda.set_stream(torch.cuda.Stream(self.runner.device))

    def session(self) -> SessionDraft:
        """The model for one more session."""
        return SessionDraft(self)

    def lend(self, session: SessionDraft) -> KVCache:
        """A cache for the session, its own where it still has one, else that of who has not needed it for longest."""
        cache = self._lent.pop(session, None)
        if cache is None:
            cache = self.runner.new_cache() if len(self._lent) < self._slots else self._lent.popitem(last=False)[1]
            cache.truncate(0)
        self._lent[session] = cache
        return cache

    def beside(self, work: Callable[[], T]) -> Future[T]:
        """Runs `work` in the model's thread."""
        return self._thread.submit(work)

    def measure(self, target: ModelRunner) -> None:
        """Sets `speed_ratio` from single-token steps of both models, in turns."""
        own, theirs = short_text(self.runner), short_text(target)
        ratios = []
        for _ in range(TIMED_STEPS + 1):
            seconds = timed_forward(target, theirs, 0)
            self.beside(lambda: timed_forward(self.runner, own, 0)).result()  # after the target, its weights are not at hand
            ratios.append(seconds / self.beside(lambda: timed_forward(self.runner, own, 0)).result())
        self.speed_ratio = statistics.median(ratios[1:])  # the first ones warm up


def short_text(runner: ModelRunner) -> KVCache:
    """A cache that holds some."""
    cache = runner.new_cache()
    cache.length = min(16, runner.context_tokens - 1)
    cache.tensor[:, :, :, : cache.length] = 0
    return cache


class SessionDraft:
    """One session's draft model. Implements `drafters.model.language_model.LanguageModel`."""

    def __init__(self, shared: DraftRunner) -> None:
        self._shared = shared
        self._text: list[int] = []  # committed; the cache holds all but its unread end
        self._params = SamplingParams(temperature=0)
        self._chooser = Sampler(self._params)
        self._prompt_length = 0
        self._foreign = False  # the text has tokens that the model does not know
        self._rows: list[int] = []  # tokens of the rows; row 0 is the text's last token
        self._depths: list[int] = []
        self._ancestors = np.zeros((1, 1), np.bool_)  # [rows, rows]

    @property
    def speed_ratio(self) -> float:
        return self._shared.speed_ratio

    def begin(self, text: Ints, sampling: Sampling | None = None) -> None:
        self._params = SamplingParams(temperature=0) if sampling is None else cast(SamplingParams, sampling)
        independent = self._params.rule == "rejection"  # its proof wants draws that tell nothing of the target's noise
        self._chooser = Sampler(replace(self._params, seed=self._params.seed ^ INDEPENDENT) if independent else self._params)
        cache, tokens = self._shared.lend(self), text.tolist()
        cache.truncate(min(common_prefix(np.array(self._text, np.int32), text), len(tokens) - 1))
        self._text, self._prompt_length = tokens, len(tokens)
        self._foreign = max(tokens) >= self._shared.runner.vocabulary
        self._drop()

    @property
    def space(self) -> int:
        if self._foreign:
            return 0
        return max(0, min(MAX_NODES, self._shared.runner.context_tokens - len(self._text)) - max(0, len(self._rows) - 1))

    def root(self, count: int) -> Candidates:
        cache, runner = self._shared.lend(self), self._shared.runner
        self._drop()
        while len(unread := self._text[cache.length :]) > MAX_NODES:
            chunk = torch.tensor(unread[:-1][:PREFILL_CHUNK_TOKENS])
            runner.forward(cache, chunk, logits=False)
            cache.length += len(chunk)
        logits = runner.forward(cache, torch.tensor(unread))[-1:]
        cache.length += len(unread) - 1
        self._rows, self._depths, self._ancestors = [unread[-1]], [0], np.ones((1, 1), np.bool_)
        return self._candidates(logits, [0], count)

    def expand(self, tokens: Sequence[int], parents: Sequence[int], count: int) -> Candidates:
        known, size = len(self._rows), len(self._rows) + len(tokens)
        seen = np.eye(size, dtype=np.bool_)
        seen[:known, :known] = self._ancestors
        for row, parent in enumerate(parents, start=known):
            seen[row] |= seen[parent]
        self._rows += tokens
        for parent in parents:
            self._depths.append(self._depths[parent] + 1)
        self._ancestors = seen
        rows, depths = torch.tensor(self._rows), torch.tensor(self._depths)
        logits = self._shared.runner.forward(self._shared.lend(self), rows, depths, torch.from_numpy(seen), known=known)
        return self._candidates(logits, self._depths[known:], count)

    def retract(self, rows: int) -> None:
        self._rows, self._depths, self._ancestors = self._rows[:rows], self._depths[:rows], self._ancestors[:rows, :rows]

    def advance(self, tokens: Ints) -> None:
        path = self._follow(tokens.tolist())
        self._text += tokens.tolist()
        self._foreign = self._foreign or (bool(len(tokens)) and int(tokens.max()) >= self._shared.runner.vocabulary)
        if not path:
            return
        cache = self._shared.lend(self)
        cache.commit(path)
        if len(path) <= len(tokens):  # the last token has no row
            self._drop()
            return
        cache.length -= 1  # the new root is a row, too
        root = path[-1]
        if path == list(range(root + 1)) and self._ancestors[root:, root].all():  # so all that is left hangs below it, in place
            self._rows, self._ancestors = self._rows[root:], self._ancestors[root:, root:]
            self._depths = [depth - self._depths[root] for depth in self._depths[root:]]
        else:
            self._drop()

    def beside(self, work: Callable[[], T]) -> Future[T]:
        return self._shared.beside(work)

    def _follow(self, tokens: Sequence[int]) -> list[int]:
        """The rows along committed tokens, from row 0 down; empty where there are no rows."""
        if not self._rows:
            return []
        path = [0]
        for token in tokens:
            at = path[-1]
            below = (
                row
                for row in range(at + 1, len(self._rows))
                if self._rows[row] == token and self._ancestors[row, at] and self._depths[row] == self._depths[at] + 1
            )
            row = next(below, None)
            if row is None:
                break
            path.append(row)
        return path

    def _drop(self) -> None:
        self._rows, self._depths, self._ancestors = [], [], np.zeros((0, 0), np.bool_)

    def _candidates(self, logits: torch.Tensor, depths: Sequence[int], count: int) -> Candidates:
        """Of rows at these depths below the text's end; logits [R, V]."""
        logits = logits[:, : self._shared.shared_vocabulary].float()
        count = min(count, logits.shape[-1])
        if self._params.greedy:
            values, tokens = logits.topk(count, -1)
            return Candidates(as_ints(tokens), as_floats((values - logits.logsumexp(-1, keepdim=True)).exp()))
        weights = warp_logits(logits, self._params)
        first = len(self._text) - self._prompt_length
        tokens = self._chooser.scores(weights, [first + depth for depth in depths]).topk(count, -1).indices
        shares = weights.softmax(-1)
        q: NDArray[np.float32] | None = None
        if self._params.rule == "rejection":
            q = as_floats(torch.nn.functional.pad(shares, (0, self._shared.vocabulary - shares.shape[-1])))
        return Candidates(as_ints(tokens), as_floats(shares.gather(-1, tokens)), q)


def as_ints(values: torch.Tensor) -> Ints:
    """On the host, int32."""
    return cast(Ints, values.int().cpu().numpy())


def as_floats(values: torch.Tensor) -> Floats:
    """On the host, float32."""
    return cast(Floats, values.float().cpu().numpy())
