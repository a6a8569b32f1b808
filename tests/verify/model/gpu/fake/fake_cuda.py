"""Tensors on `cuda` without a GPU: they have shapes, types and devices, but no values.

Code that reads a value raises, as torch's fake tensors do. A `Device` records what runs inside it: launches, the bytes that
they read and write, and what a captured region may not do.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from torch.utils.cpp_extension import include_paths

from outrider.verify.model import transfer
from outrider.verify.model.gpu import graphs, triton_attention, triton_recurrence

CUDA = torch.device("cuda", 0)
CAPABILITY = (9, 0)
INDEXED = {torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_}
# Operations that wait for the device, because their result's shape or value goes to the host.
SYNCHRONISING = {
    torch.ops.aten._local_scalar_dense,
    torch.ops.aten.bincount,
    torch.ops.aten.equal,
    torch.ops.aten.item,
    torch.ops.aten.masked_select,
    torch.ops.aten.nonzero,
    torch.ops.aten._unique2,
}
# Operations that only describe memory, and launch nothing.
DESCRIBING = {torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.new_empty, torch.ops.aten.empty_strided}


@cache
def install_guard() -> None:
    """Compiles and loads guard.cpp, once for each process, which takes 3 seconds."""
    library = Path(tempfile.mkdtemp()) / "guard.so"
    source, of_torch = Path(__file__).with_name("guard.cpp"), Path(torch.__file__).parent / "lib"
    headers = [f"-I{each}" for each in include_paths()]
    subprocess.run(
        ["g++", "-std=c++20", "-shared", "-fPIC", *headers, source, f"-L{of_torch}", "-lc10", "-o", library], check=True
    )
    ctypes.CDLL(str(library))


class Device(TorchDispatchMode):
    """Records what runs inside it on fake tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches = 0
        self.bytes = 0  # read and written by all launches
        self.operations = Counter[str]()
        self.forbidden: list[str] = []  # in a captured region
        self._is_capturing = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs, result = tensors_in((args, kwargs)), func(*args, **kwargs)
        outputs = tensors_in(result)
        if any(each.is_cuda for each in inputs + outputs) and launches(func, inputs, outputs):
            self.launches += 1
            self.bytes += sum(each.nbytes for each in inputs + outputs)
            self.operations[str(func)] += 1
        if self._is_capturing and (reason := broken_rule(func, args, inputs + outputs)):
            self.forbidden.append(f"{func} {reason}: {[(str(each.device), tuple(each.shape)) for each in inputs]}")
        return result

    @contextmanager
    def capture(self, device: torch.device) -> Iterator[Any]:
        """As `outrider.verify.model.gpu.staged_graph.Capture`: notes what CUDA would refuse to capture."""
        self._is_capturing = True
        try:
            yield lambda: None
        finally:
            self._is_capturing = False


def tensors_in(values: Any) -> list[torch.Tensor]:
    return [each for each in tree_flatten(values)[0] if isinstance(each, torch.Tensor)]


def launches(func: Any, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> bool:
    """Whether an operation runs a kernel: it writes to an input, or its result is new memory that is filled."""
    if func._schema.is_mutable:
        return True
    known = {each.untyped_storage()._cdata for each in inputs}
    new = [each for each in outputs if each.untyped_storage()._cdata not in known]
    return bool(new) and func.overloadpacket not in DESCRIBING


def broken_rule(func: Any, args: Any, tensors: list[torch.Tensor]) -> str | None:
    """Why an operation cannot be part of a CUDA graph; None if it can."""
    if func.overloadpacket in SYNCHRONISING:
        return "waits for the device"
    if func.overloadpacket in INDEXED and any(each.dtype == torch.bool for each in tensors_in(args[1])):
        return "waits for the number of true elements"
    if any(not each.is_cuda for each in tensors):
        return "uses memory of the host"
    if len({each.device for each in tensors}) > 1:
        return "uses several devices"
    return None


@contextmanager
def fake_cuda() -> Iterator[Device]:
    """New tensors inside are fake, and may be on `cuda:0`, `cuda:1` and so on, of compute capability CAPABILITY."""
    install_guard()
    device = Device()
    with pytest.MonkeyPatch.context() as patch:
        for module in (transfer, graphs, triton_attention, triton_recurrence):
            patch.setattr(module, "on_device", lambda _: nullcontext())  # which needs a driver
        patch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
        patch.setattr(FakeTensor, "data_ptr", lambda tensor: id(tensor), raising=False)
        patch.setattr(torch.cuda, "get_device_capability", lambda device=None: CAPABILITY)
        with FakeTensorMode(), device:
            yield device
