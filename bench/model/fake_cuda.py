"""Tensors on `cuda` without a GPU: they have shapes, types and devices, but no values.

Code that reads a value raises, as torch's fake tensors do. A `Device` records what runs inside it: launches, the bytes that
they read and write, and what a captured region may not do.
"""

import ctypes
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from torch.utils.cpp_extension import include_paths
from transformers import AutoModelForCausalLM, PreTrainedModel

from outrider.verify.model import transfer
from outrider.verify.model.attention.interface import NAME
from outrider.verify.model.gpu import graphs, triton_attention, triton_recurrence
from outrider.verify.model.gpu.devices import Placement
from outrider.verify.model.loading import prepare

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
    """Compiles and loads guard.cpp (3 s, once per process)."""
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
            self.record(func, inputs, outputs)
        if self._is_capturing and (reason := broken_rule(func, args, inputs + outputs)):
            self.forbidden.append(f"{func} {reason}: {[(str(each.device), tuple(each.shape)) for each in inputs]}")
        return result

    def record(self, func: Any, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        self.launches += 1
        self.bytes += sum(each.nbytes for each in inputs + outputs)
        self.operations[str(func)] += 1

    @contextmanager
    def capture(self, device: torch.device) -> Iterator[Any]:
        """See `outrider.verify.model.gpu.graphs.Capture`; notes operations that CUDA would refuse to capture."""
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
def fake_cuda(device: Device | None = None) -> Iterator[Device]:
    """New tensors inside are fake, and may be on `cuda:0`, `cuda:1` and so on, of compute capability CAPABILITY.

    What runs is recorded by `device`. Needs a build of torch without CUDA, and a C++ compiler.
    """
    install_guard()
    device = device or Device()
    with ExitStack() as stack:
        for module in (transfer, graphs, triton_attention, triton_recurrence):
            stack.enter_context(patch.object(module, "on_device", lambda _: nullcontext()))  # which needs a driver
        stack.enter_context(patch.object(torch.Tensor, "pin_memory", lambda tensor: tensor))
        stack.enter_context(patch.object(FakeTensor, "data_ptr", lambda tensor: id(tensor), create=True))
        stack.enter_context(patch.object(torch.cuda, "get_device_capability", lambda device=None: CAPABILITY))
        stack.enter_context(FakeTensorMode())
        stack.enter_context(device)
        yield device


def fake_model(config: Any, devices: Sequence[torch.device] = (CUDA,)) -> PreTrainedModel:
    """A model without values, in bfloat16 on these devices. Fake tensors refuse to change in place, as models do to move."""
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=NAME).eval()
    moved: dict[int, torch.nn.Parameter] = {}  # by the tensor on the host, which several modules may share
    for device, modules in Placement(model, devices).modules.items():
        for module in modules:
            for name, weight in module._parameters.items():
                if weight is not None:
                    new = torch.nn.Parameter(weight.to(device), requires_grad=False)
                    module._parameters[name] = moved.setdefault(id(weight), new)
            module._buffers |= {name: each.to(device) for name, each in module._buffers.items() if each is not None}
    prepare(model, None)
    return cast(PreTrainedModel, model)
