"""Computes the forwards of several sessions that draft at the same time together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from outrider.verify.errors import lost_device
from outrider.verify.model.batch import Segment
from outrider.verify.sampling.rows import Logits, copies

# Each piece of work needs a thread. Threads are started when they are needed.
MAX_THREADS = 256


class Gathering:
    """Work of several sessions in a thread each. Once all of them wait for a forward or have ended, one forward is computed.

    One thread works at a time, so that what sessions share, such as datastores, needs no locks.
    """

    def __init__(self, together: Callable[[Sequence[Segment]], list[Logits]], alone: Callable[[Segment], Logits]) -> None:
        """`together` computes several segments; `alone` one of them, if that fails."""
        self._together, self._alone = together, alone
        self._threads = ThreadPoolExecutor(MAX_THREADS, "outrider-drafts", torch.set_num_threads, (1,))
        self._turn = threading.Lock()  # held by the thread that works
        self._changed = threading.Condition()
        self._working = 0  # number of threads that neither wait for a forward nor have ended
        self._waiting: list[tuple[Segment, Future[Logits]]] = []
        self._local = threading.local()

    @property
    def is_working(self) -> bool:
        """Whether the caller is work that this object runs."""
        return getattr(self._local, "is_working", False)

    def run(self, work: Sequence[Callable[[], None]]) -> None:
        """Returns once all work has ended. Computes in the caller's thread. Raises what work raises."""
        self._working = len(work)
        ended = [self._threads.submit(self._work, each) for each in work]
        while waiting := self._all_waiting():
            results = self._compute([segment for segment, _ in waiting])
            self._working = len(waiting)
            for (_, future), result in zip(waiting, results, strict=True):
                if isinstance(result, Exception):
                    future.set_exception(result)
                else:
                    future.set_result(result)
        for each in ended:
            each.result()

    def forward(self, segment: Segment) -> Logits:
        """The segment's logits, valid until the caller's next forward. Called by work."""
        future = Future[Logits]()
        with self._changed:
            self._waiting.append((segment, future))
            self._working -= 1
            self._changed.notify()
        self._turn.release()
        try:
            return future.result()
        finally:
            self._turn.acquire()

    def _work(self, work: Callable[[], None]) -> None:
        self._local.is_working = True
        try:
            with self._turn:
                work()
        finally:
            with self._changed:
                self._working -= 1
                self._changed.notify()

    def _all_waiting(self) -> list[tuple[Segment, Future[Logits]]]:
        """The segments that wait for a forward, once no work goes on without it; empty once all work has ended."""
        with self._changed:
            self._changed.wait_for(lambda: not self._working)
            waiting, self._waiting = self._waiting, []
        return waiting

    def _compute(self, segments: list[Segment]) -> list[Logits | Exception]:
        """The logits of each segment, or the error that ends its work."""
        try:
            return [*self._together(segments)]
        except lost_device() as error:  # only a new process can use the device again
            return [error for _ in segments]
        except Exception:
            return [self._one(segment) for segment in segments]  # one of them may be the reason

    def _one(self, segment: Segment) -> Logits | Exception:
        try:
            return copies([self._alone(segment)])[0]
        except Exception as error:
            return error
