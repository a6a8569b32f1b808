"""A draft model that sessions share: its runner, its thread, and a pool of caches."""

from __future__ import annotations

import statistics
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar
from weakref import ReferenceType, ref

from outrider.drafters.model.pair import Pair
from outrider.verify.draft_model.session import SessionDraft
from outrider.verify.draft_model.shared_ids import SharedIds
from outrider.verify.measurement import timed_forward
from outrider.verify.model.batch import ForwardBatch
from outrider.verify.model.cache.kv_cache import KVCache, OutOfPages
from outrider.verify.model.runner import ModelRunner
from outrider.verify.sampling.rows import Logits, copies

if TYPE_CHECKING:
    from outrider.verify.draft_model.gpu_threads import GpuThreads

T = TypeVar("T")
# Steps that are timed of each kind, the tokens of a prompt, and those of the texts after which forwards are compared.
TIMED, READ_TOKENS, SHORT, LONG = 8, 64, 16, 2048


class DraftRunner:
    """A draft model shared by sessions: the runner, its thread and a pool of caches."""

    def __init__(
        self, runner: ModelRunner, vocabulary: int, slots: int = 4, differences: Mapping[int, int] = MappingProxyType({})
    ) -> None:
        """`vocabulary` is the number of the target's logits; `differences` are those of `find_differences`."""
        self.runner = runner
        self.ids = SharedIds(vocabulary, runner.vocabulary, differences)
        self.pair = Pair()
        self._slots = slots
        self._caches: OrderedDict[ReferenceType[SessionDraft], KVCache] = OrderedDict()  # least recently used first
        self._thread = ThreadPoolExecutor(1, "outrider-draft", initializer=self._prepare_thread)
        self._assigning = threading.Lock()  # held while caches are assigned to sessions
        self._running = threading.Lock()  # a runner computes one forward at a time
        self._gpu: GpuThreads | None = None
        if runner.device.type == "cuda":
            from outrider.verify.draft_model.gpu_threads import GpuThreads  # imports torch

            self._gpu = GpuThreads(runner.device)

    def _prepare_thread(self) -> None:
        """One CPU thread; on a GPU, also a separate stream."""
        if torch := sys.modules.get("torch"):
            torch.set_num_threads(1)  # applies to the calling thread
        if self._gpu is not None:
            self._gpu.start_thread()

    def session(self) -> SessionDraft:
        return SessionDraft(self)

    def held_cache(self, session: SessionDraft) -> KVCache | None:
        return self._caches.get(ref(session))

    def cache_for(self, session: SessionDraft) -> KVCache:
        """The session's cache; if it has none, the cache of an ended session, a new one, or the least recently used one."""
        with self._assigning:
            cache = self._caches.pop(ref(session), None)
            if cache is None:
                taken = next((owner for owner in self._caches if owner() is None), None)
                if taken is None and len(self._caches) >= self._slots:
                    taken = next(iter(self._caches))
                cache = self.runner.new_cache() if taken is None else self._caches.pop(taken)
                cache.truncate(0)
            self._caches[ref(session)] = cache
            return cache

    def fork(self, source: SessionDraft, forked: SessionDraft, length: int) -> None:
        """Copies the first `length` rows of a session's cache, or as many as there are, to the cache of its fork."""
        if ref(source) not in self._caches or self._slots < 2:
            return
        rows = self.cache_for(source)  # it is now the most recently used one, which the fork does not take
        self.synchronize()
        self.cache_for(forked).fork(rows, length)

    def synchronize(self) -> None:
        """Waits for the device: threads have streams of their own."""
        if self._gpu is not None:
            self._gpu.wait()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Runs `work` in the draft model's thread. Once it is done, the device has done it, too: threads have own streams."""

        def completed() -> T:
            result = work()
            if self._gpu is not None:
                self._gpu.wait_for_thread()
            return result

        return self._thread.submit(completed)

    def forward(self, cache: KVCache, batch: ForwardBatch, logits: bool = True) -> Logits:
        """`ModelRunner.forward`, from any thread. Without enough pages, the least recently used session's are taken."""
        with self._running, nullcontext() if self._gpu is None else self._gpu.in_order():
            while True:
                try:
                    return self._own(self.runner.forward(cache, batch, logits))
                except OutOfPages:
                    oldest = next((each for each in self._caches.values() if each is not cache and each.length), None)
                    if oldest is None:
                        raise
                    oldest.truncate(0)  # its session reads the text again

    def _own(self, logits: Logits) -> Logits:
        """The logits, which on a GPU the forward of another thread would overwrite. Does not wait for them."""
        return logits if self._gpu is None else copies([logits])[0]

    def measure(self, target: ModelRunner) -> bool:
        """Times steps of both models in turns and at once, the reading of a prompt, and longer texts.

        Returns whether that has corrected `pair`.
        """
        context_seconds = self._context_seconds()
        own, other = filled(self.runner, SHORT), filled(target, SHORT)
        timed_forward(self.runner, own, 0)
        steps = [
            (timed_forward(target, other, 0), *(timed_forward(self.runner, own, 0) for _ in range(2))) for _ in range(TIMED)
        ]
        # The first step after the target's loads the weights into the CPU's cache.
        alone, _, drafts = zip(*steps[1:], strict=True)
        tokens = min(READ_TOKENS, self.runner.context_tokens // 2)
        reading = min(timed_forward(self.runner, own, tokens - 1, reads=True) for _ in range(2))
        verified = threading.Event()

        def draft() -> list[float]:
            seconds: list[float] = []
            while not verified.is_set() or not seconds:
                seconds.append(timed_forward(self.runner, own, 0))
            return seconds

        drafting = self.submit(draft)
        beside = [timed_forward(target, other, 0) for _ in range(TIMED)]
        verified.set()
        median = statistics.median
        return self.pair.correct(
            {
                "target_seconds": min(alone),
                "draft_seconds": min(drafts),
                "read_seconds": reading / tokens,
                "context_seconds": context_seconds,
                "target_slowdown": max(1.0, median(beside) / median(alone)),
                "draft_slowdown": max(1.0, median(drafting.result()) / median(drafts)),
            }
        )

    def _context_seconds(self) -> float:
        """Seconds that each token of the text adds to a forward over one row: from the smallest of some times."""
        short, long = SHORT, min(LONG, self.runner.context_tokens // 2)
        if long <= short:
            return 0.0
        caches = [filled(self.runner, length) for length in (long, short)]
        after_long, after_short = (min(timed_forward(self.runner, cache, 0) for _ in range(TIMED)) for cache in caches)
        return max(0.0, after_long - after_short) / (long - short)


def filled(runner: ModelRunner, length: int) -> KVCache:
    cache = runner.new_cache()
    cache.fill(min(length, runner.context_tokens - 1))
    return cache
