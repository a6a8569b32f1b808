"""A forward over several devices as one captured graph for each stretch on one device, and copies between them.

The two functions of `torch._C` are private; `torch.cuda.use_mem_pool` ends with them in PyTorch 2.11 to 2.13.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import torch

from outrider.verify.model.gpu.devices import Crossings

# Captures what is launched on a device inside the context, and gives the function that repeats it.
Capture = Callable[[torch.device], AbstractContextManager[Callable[[], Any]]]


class StagedGraph:
    """One captured forward."""

    def __init__(self, capture: Capture, prepare: Callable[[torch.device], None]) -> None:
        """`prepare` is what each stage on a device begins with."""
        self._capture, self._prepare = capture, prepare
        self._stages: list[Callable[[], Any]] = []
        self._open = ExitStack()  # the graph that is being captured

    @contextmanager
    def recorded(self, crossings: Crossings) -> Iterator[None]:
        """Captures the forward inside the context, which begins and ends on the first device."""
        crossings.recorder = self
        try:
            with self._open:
                self._begin(crossings.first)
                yield
        finally:
            crossings.recorder = None

    def _begin(self, device: torch.device) -> None:
        self._device = device
        self._stages.append(self._open.enter_context(self._capture(device)))
        self._prepare(device)

    def turn(self, device: torch.device) -> None:
        """Continues with what is launched on this device; a replay launches it while other devices compute."""
        if device != self._device:
            self._open.close()
            self._begin(device)

    def copy(self, tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
        """Copies the tensors to the device on which the forward continues, into memory that each replay reads."""
        self._open.close()
        copies = [tensor.to(device) for tensor in tensors]
        for tensor, copy in zip(tensors, copies, strict=True):
            self._stages.append(partial(copy.copy_, tensor))
        self._begin(device)
        return copies

    @torch.inference_mode()
    def replay(self) -> None:
        """Repeats the forward. Devices wait for each other in their streams, without the host."""
        for stage in self._stages:
            stage()


class CudaCapture:
    """Captures CUDA graphs, on one side stream per device; graphs of a device share their memory."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._streams = {device: torch.cuda.Stream(device) for device in devices}
        self._pools = {device: torch.cuda.graph_pool_handle() for device in devices}

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Runs what is launched inside the context on the side streams; afterwards, the current ones wait for them."""
        with ExitStack() as inside:
            for stream in reversed(self._streams.values()):  # so that the first device is the current one
                stream.wait_stream(torch.cuda.current_stream(stream.device))
                inside.enter_context(torch.cuda.stream(stream))
            yield
        for stream in self._streams.values():
            torch.cuda.current_stream(stream.device).wait_stream(stream)

    @contextmanager
    def __call__(self, device: torch.device) -> Iterator[Callable[[], Any]]:
        """See `Capture`. Other threads' work on the device does not end the capture.

        A failed capture leaves the current stream and the allocator as they were, which PyTorch does not.
        """
        graph, thread, pool = torch.cuda.CUDAGraph(), "thread_local", self._pools[device]
        with torch.cuda.stream(torch.cuda.current_stream(device)):
            try:
                with torch.cuda.graph(graph, pool, self._streams[device], capture_error_mode=thread):
                    yield graph.replay
            except Exception:
                with suppress(RuntimeError):  # it has ended, if the error was not CUDA's
                    torch._C._cuda_endAllocateToPool(device.index or 0, pool)
                    torch._C._cuda_releasePool(device.index or 0, pool)
                raise
