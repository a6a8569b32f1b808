"""Several devices and CUDA graphs on one CPU: `cpu:0`, `cpu:1` and so on, beside the host, which is `cpu`.

Each tensor has a device, which `Tensor.device` tells. An operation over tensors of several devices fails as on GPUs; only
copies cross. What is captured on a device is repeated operation by operation, into the same memory.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

HOST = torch.device("cpu")
READ_DEVICE = torch.Tensor.device.__get__
CROSSING = {torch.ops.aten.copy_, torch.ops.aten._to_copy, torch.ops.aten.to}
INDEXED = {torch.ops.aten.index, torch.ops.aten.index_put_}


class Devices:
    """Where tensors are, by their storages, and what is being captured."""

    def __init__(self) -> None:
        self._places: dict[int, tuple[torch.UntypedStorage, torch.device]] = {}  # with the storage, whose address is the key
        self.captured: list[Callable[[], None]] | None = None
        self.capturing: torch.device | None = None
        self.copies = 0  # between devices
        self.host_copies = 0  # between a device and the host

    def of(self, tensor: torch.Tensor) -> torch.device:
        found = self._places.get(storage(tensor)._cdata)
        return HOST if found is None else found[1]

    def put(self, tensor: torch.Tensor, device: torch.device) -> None:
        self._places.setdefault(storage(tensor)._cdata, (storage(tensor), device))

    @contextmanager
    def capture(self, device: torch.device) -> Iterator[Callable[[], None]]:
        """As `outrider.verify.model.gpu.graphs.Capture`."""
        assert self.captured is None, "a graph is being captured"
        captured: list[Callable[[], None]] = []
        self.captured, self.capturing = captured, device

        def replay() -> None:
            for step in captured:
                step()

        try:
            yield replay
        finally:
            self.captured = self.capturing = None


def storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    with torch._C.DisableTorchFunction():
        return tensor.untyped_storage()


class Operations(TorchDispatchMode):
    """Checks that an operation's tensors are on one device, and notes its results' device."""

    def __init__(self, devices: Devices) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._devices = devices

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, torch.Tensor)]
        places = {self._devices.of(each) for each in tensors}
        numbers = func.overloadpacket in INDEXED
        if len(places) > 1 and all(each.dim() == 0 or numbers for each in tensors if self._devices.of(each) == HOST):
            places -= {HOST}  # as on a GPU, numbers and indices of the host may meet tensors of a device
        if func.overloadpacket in CROSSING:
            between = {*places, kwargs.get("device") or next(iter(places))}
            self._devices.copies += len(between - {HOST}) > 1
            self._devices.host_copies += HOST in between and len(between) > 1
        elif len(places) > 1:
            raise RuntimeError(f"Expected all tensors to be on the same device, but found {sorted(map(str, places))}: {func}")
        with torch._C.DisableTorchFunction():
            result = func(*args, **kwargs)
        place = kwargs.get("device") or (
            self._devices.of(args[0]) if func.overloadpacket in CROSSING else next(iter(places), HOST)
        )
        outputs = [each for each in tree_flatten(result)[0] if isinstance(each, torch.Tensor)]
        for each in outputs:
            self._devices.put(each, torch.device(place))
        launches = func._schema.is_mutable or not {storage(each)._cdata for each in outputs} <= {
            storage(each)._cdata for each in tensors
        }
        if self._devices.captured is not None and launches:
            assert {self._devices.of(each) for each in outputs} <= {self._devices.capturing}, "launched on another device"
            self._devices.captured.append(repeat(func, args, kwargs, result))
        return result


def repeat(func: Any, args: Any, kwargs: Any, result: Any) -> Callable[[], None]:
    def run() -> None:
        for old, new in zip(tree_flatten(result)[0], tree_flatten(func(*args, **kwargs))[0], strict=True):
            if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                old.copy_(new)

    return run


class Reads(TorchFunctionMode):
    """What Python reads of a tensor: its device, and copies to the host, which torch takes for the tensor itself."""

    def __init__(self, devices: Devices) -> None:
        super().__init__()
        self._devices = devices

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == READ_DEVICE:
            return self._devices.of(args[0])
        others = [each for each in (*args[1:], *kwargs.values()) if isinstance(each, (str, torch.device))]
        if func is torch.Tensor.cpu or (func is torch.Tensor.to and any(each in (HOST, "cpu") for each in others)):
            return func(*args, **kwargs) if self._devices.of(args[0]) == HOST else self._to_host(args[0], kwargs)
        return func(*args, **kwargs)

    def _to_host(self, tensor: torch.Tensor, kwargs: Any) -> torch.Tensor:
        self._devices.host_copies += 1
        content = tensor.detach().reshape(-1).view(torch.uint8).numpy().copy()  # NumPy has not all types
        return torch.from_numpy(content).view(tensor.dtype).view(tensor.shape).to(kwargs.get("dtype", tensor.dtype))


@contextmanager
def emulated_devices() -> Iterator[Devices]:
    """Tells devices apart inside the context. Skips with a GPU, since kernels are then compiled for it."""
    if torch.cuda.is_available():
        pytest.skip("devices are emulated without a GPU")
    devices = Devices()
    with Reads(devices), Operations(devices):
        yield devices
