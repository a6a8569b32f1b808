"""A GPU with a clock on one CPU: tensors on `cuda` have values, launches queue, and the host waits as CUDA makes it wait.

Everything is computed at once, but on a clock of its own: the graph of a forward keeps the device busy for some seconds, all
other launches for none. A download or a synchronisation moves the host's clock to the end of what was launched before it, and
is noted. So the device's own branches of the code run, and what overlaps is a matter of arithmetic.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_map

from outrider.verify.model import transfer
from outrider.verify.model.gpu import graphs, text_work, triton_attention, triton_recurrence
from tests.verify.model.gpu.emulated_devices import HOST, READ_DEVICE, Devices, Operations, Reads, storage

CUDA = torch.device("cuda", 0)
# What gives the host a tensor's values.
READS = {
    torch.Tensor.__array__,
    torch.Tensor.__bool__,
    torch.Tensor.__float__,
    torch.Tensor.__index__,
    torch.Tensor.__int__,
    torch.Tensor.equal,
    torch.Tensor.item,
    torch.Tensor.nonzero,
    torch.Tensor.numpy,
    torch.Tensor.tolist,
    torch.equal,
    torch.nonzero,
}
INDEXED = {torch.Tensor.__getitem__, torch.Tensor.__setitem__}


class Clock:
    """The seconds of the host and of the device's only stream."""

    def __init__(self) -> None:
        self.now = 0.0  # of the host
        self.busy_until = 0.0  # of the stream
        self.waits: list[str] = []  # the operations for which the host waited

    def work(self, seconds: float) -> None:
        """The host works."""
        self.now += seconds

    def launch(self, seconds: float) -> None:
        """The host queues work of the device."""
        self.busy_until = max(self.busy_until, self.now) + seconds

    def wait(self, reason: str, until: float | None = None) -> None:
        """The host waits for everything that is queued, or until a time."""
        self.waits.append(reason)
        self.now = max(self.now, self.busy_until if until is None else until)


class Event:
    """As `torch.cuda.Event`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def record(self, stream: Any) -> None:
        self._at = self._clock.busy_until

    def synchronize(self) -> None:
        self._clock.wait("event", self._at)


class Stream:
    """As `torch.cuda.Stream`: the only one, whatever the thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def wait_event(self, event: Event) -> None:
        """Nothing: the stream is in order."""

    def synchronize(self) -> None:
        self._clock.wait("synchronize")


class Cuda(Reads):
    """Calls `cuda` what `Devices` calls `cpu:0`, and lets the host wait for what it reads."""

    def __init__(self, devices: Devices, clock: Clock) -> None:
        super().__init__(devices)
        self._clock = clock
        self._pinned = set[int]()  # storages

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == READ_DEVICE:
            device = self._devices.of(args[0])
            return device if device == HOST else CUDA
        pins = bool((kwargs or {}).get("pin_memory"))
        given = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}
        args, kwargs = tree_map(named_inside, (args, given))
        if func is torch.Tensor.pin_memory:
            return self._pin(args[0].clone())
        on_device = bool(args) and isinstance(args[0], torch.Tensor) and self._devices.of(args[0]) != HOST
        if func in READS and on_device:
            self._clock.wait(func.__name__)
            args = (self._to_host(args[0], {}), *args[1:])
        if on_device and (func is torch.Tensor.cpu or (func is torch.Tensor.to and HOST in targets(args, kwargs))):
            self._clock.wait("copy to the host")
        if func is torch.Tensor.to and not on_device and set(targets(args, kwargs)) - {HOST}:
            self._upload(args[0], bool(kwargs.get("non_blocking")))
        if func is torch.Tensor.copy_:
            self._copy(args[0], args[1], bool(kwargs.get("non_blocking")))
        if func in INDEXED and on_device:
            self._index(args[1])
        result = super().__torch_function__(func, types, args, kwargs)
        if func is torch.tensor and (kwargs.get("device") or HOST) != HOST:
            self._devices.put(result, kwargs["device"])
        return self._pin(result) if pins else result

    def _index(self, index: Any) -> None:
        for each in tree_flatten(index)[0]:
            if isinstance(each, torch.Tensor) and (each.dtype == torch.bool or (each.dim() and self._devices.of(each) == HOST)):
                self._clock.wait("an index")

    def _copy(self, target: torch.Tensor, source: torch.Tensor, queued: bool) -> None:
        to, of = self._devices.of(target), self._devices.of(source)
        if to != HOST and of == HOST and source.dim():
            self._upload(source, queued)
        elif to == HOST and of != HOST and not (queued and storage(target)._cdata in self._pinned):
            self._clock.wait("copy to the host")

    def _upload(self, source: torch.Tensor, queued: bool) -> None:
        """CUDA copies memory that is not pinned once the stream gets there, and the host waits."""
        if not (queued and storage(source)._cdata in self._pinned):
            self._clock.wait("copy from the host")

    def _pin(self, tensor: torch.Tensor) -> torch.Tensor:
        self._kept = [*getattr(self, "_kept", []), tensor]  # so that no other storage gets its address
        self._pinned.add(storage(tensor)._cdata)
        return tensor


def targets(args: Any, kwargs: Any) -> list[torch.device]:
    """The devices that a call of `Tensor.to` names."""
    return [torch.device(each) for each in (*args[1:], *kwargs.values()) if isinstance(each, (str, torch.device))]


def named_inside(value: Any) -> Any:
    """The emulated device's name among `Devices`."""
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu", value.index or 0)
    return torch.device("cpu", 0) if isinstance(value, str) and value == "cuda" else value


class Capture:
    """As `outrider.verify.model.gpu.staged_graph.CudaCapture`. A replay takes `seconds` of the device."""

    def __init__(self, devices: Devices, clock: Clock, seconds: float) -> None:
        self._devices, self._clock, self._seconds = devices, clock, seconds

    def aside(self) -> Any:
        return nullcontext()

    @contextmanager
    def __call__(self, device: torch.device) -> Iterator[Callable[[], None]]:
        with self._devices.capture(torch.device("cpu", 0)) as repeat:

            def replay() -> None:
                repeat()
                self._clock.launch(self._seconds)

            yield replay


@contextmanager
def emulated_cuda(forward_seconds: float = 0.0, rows: int = 8) -> Iterator[Clock]:
    """One GPU inside, whose forwards take this long. They are captured for one number of rows, which saves time."""
    clock, devices = Clock(), Devices()
    with pytest.MonkeyPatch.context() as patch:
        for module in (transfer, graphs, triton_attention, triton_recurrence):
            patch.setattr(module, "on_device", lambda _: nullcontext())
        patch.setattr(text_work, "capability", lambda _: 0)
        patch.setattr(graphs, "ROWS", (rows,))
        patch.setattr(graphs, "CudaCapture", lambda _: Capture(devices, clock, forward_seconds))
        patch.setattr(torch.cuda, "Event", lambda: Event(clock))
        patch.setattr(torch.cuda, "current_stream", lambda _: Stream(clock))
        patch.setattr(torch.cuda, "synchronize", lambda _: clock.wait("synchronize"))
        patch.setattr(time, "perf_counter", lambda: clock.now)
        with Cuda(devices, clock), Operations(devices):
            yield clock
