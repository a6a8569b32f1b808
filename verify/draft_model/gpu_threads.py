"""Threads that share one GPU. Each has a stream of its own, so what they launch has no order of its own."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class GpuThreads:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: torch.cuda.Event | None = None  # the end of the last forward, in any thread's stream

    def start_thread(self) -> None:
        """Gives the calling thread a stream of its own."""
        torch.cuda.set_stream(torch.cuda.Stream(self._device))

    def wait(self) -> None:
        """Waits for all threads' launches."""
        torch.cuda.synchronize(self._device)

    def wait_for_thread(self) -> None:
        """Waits for the calling thread's launches."""
        torch.cuda.current_stream(self._device).synchronize()

    @contextmanager
    def in_order(self) -> Iterator[None]:
        """Queues a forward behind the last one, with which it shares memory."""
        stream = torch.cuda.current_stream(self._device)
        if self._last is not None:
            stream.wait_event(self._last)
        try:
            yield
        finally:
            self._last = torch.cuda.Event()
            self._last.record(stream)
