"""Threads that principals share fairly; each thread has a resource of its own, such as a tokenizer.

Promises that a principal has at most one thread at a time, that the principals take turns, and that work whose caller has
left is not started. So one client's long work does not delay another's. Without keys, all clients are one principal, which may
have all threads.
"""

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

# All clients of a server without keys are this principal.
ANYONE = "anyone"
R = TypeVar("R")
T = TypeVar("T")


class FairThreads(Generic[R]):
    """Runs functions of a resource. All methods but `close` are called on the event loop."""

    def __init__(self, resources: Sequence[R], name: str) -> None:
        """One thread per resource; `name` is the threads' prefix."""
        self._idle = list(resources)
        self._executor = ThreadPoolExecutor(len(resources), name)
        self._running = Counter[str]()  # threads by principal
        # The work of each principal in order; the principal whose turn is next comes first.
        self._waiting: OrderedDict[str, deque[tuple[Callable[[R], Any], asyncio.Future[Any]]]] = OrderedDict()

    def is_idle(self, resource: R) -> bool:
        return resource in self._idle

    async def run(self, principal: str, work: Callable[[R], T]) -> T:
        """Runs work in a thread at the principal's turn."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(principal, deque()).append((work, future))
        self._start()
        return await future

    def close(self) -> None:
        """Drops the waiting work, and blocks until the running work is finished."""
        self._executor.shutdown(cancel_futures=True)

    def _start(self) -> None:
        """Starts work while there are idle resources and principals that may use one."""
        while self._idle and (principal := self._next()) is not None:
            work, future = self._waiting[principal].popleft()
            if not self._waiting[principal]:
                del self._waiting[principal]
            if not future.cancelled():
                self._running[principal] += 1
                resource = self._idle.pop(0)
                running = asyncio.get_running_loop().run_in_executor(self._executor, work, resource)
                running.add_done_callback(lambda done, p=principal, r=resource, f=future: self._finish(p, r, f, done))  # type: ignore[misc]

    def _next(self) -> str | None:
        return next((each for each in self._waiting if each == ANYONE or not self._running[each]), None)

    def _finish(self, principal: str, resource: R, future: asyncio.Future[Any], done: asyncio.Future[Any]) -> None:
        self._running -= Counter([principal])  # without those that have none
        if principal in self._waiting:
            self._waiting.move_to_end(principal)
        self._idle.insert(0, resource)
        if not future.cancelled() and not done.cancelled():
            if (error := done.exception()) is None:
                future.set_result(done.result())
            else:
                future.set_exception(error)
        self._start()
