"""torch.compile for the layers of a model, with options of `torch._dynamo` and `torch.fx.experimental`, which are private.

They are the base class of the compiler's errors and two settings. `_no_split_modules`, which names the classes of layers, is
private to transformers. Tested with PyTorch 2.13 and transformers 5.23. `tests/verify/model/gpu/test_graphs.py` fails if
a name is missing.

Without the error's class, every exception of the first forward has to count as a failed compilation. Without the limit, layers
of many kinds fall back to Python; `compile="off"` serves any model, without fused kernels. Without `use_duck_shape`,
torch.compile assumes that equal sizes stay equal, so a number of rows that equals another size is compiled separately. Without
the layers' names, the whole model is compiled at once, which takes longer.

`AsyncCompileMode` is Triton's own, in 3.6 and 3.7; it compiles kernels in threads. Every launch calls `JITFunction.run`, which
finds kernels in `device_caches`, or what waits for them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event, Lock, get_ident
from typing import Any

import torch
import torch._dynamo
import torch.fx.experimental._config
from transformers import PreTrainedModel
from triton import AsyncCompileMode
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

# The limit of variants of a layer (by kind of layer and number of rows) that torch.compile may make.
RECOMPILE_LIMIT = 64
# The integer attributes of modules that are variables in compiled code, so that one layer's code is reused for the others. All
# other integers, such as sizes, are constants, because kernels are slow if they divide by variables.
LAYER_NUMBERS = "cache_layer", "recurrent_layer", "layer_idx", "layer_id", "layer_number"
DYNAMIC_SOURCES = rf".*\.({'|'.join(LAYER_NUMBERS)})"

CompileError = torch._dynamo.exc.TorchDynamoException


def layers_of(model: PreTrainedModel) -> list[torch.nn.Module]:
    """The modules to compile: the layers, and the norms beside them, such as the last one."""
    names = model._no_split_modules or ()
    layers = [module for module in model.modules() if type(module).__name__ in names]
    beside = [module for module in model.get_decoder().children() if "Norm" in type(module).__name__] if layers else []
    return [*layers, *beside]


@contextmanager
def compiled_layers(model: PreTrainedModel, backend: Any = "inductor") -> Iterator[None]:
    """Runs the model's layers through torch.compile inside the context; fused kernels make a captured step faster.

    Compiles layer by layer: the layers of a model are alike, so the code for one serves the others and any number of rows but
    one. That number is `dynamic` from the first forward on, since code of its own may compute rows with other bits. The first
    forward raises CompileError if the model cannot be compiled.
    """
    layers = layers_of(model) or [model]
    compiler: Any = torch.compiler.config  # `patch` is not in their types
    symbols: Any = torch.fx.experimental._config
    for layer in layers:
        layer.forward = torch.compile(layer.forward, backend=backend, dynamic=True)
    try:
        with (
            torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT),
            compiler.patch(dynamic_sources=DYNAMIC_SOURCES),
            symbols.patch(use_duck_shape=False),
        ):
            yield
    finally:
        for layer in layers:
            del layer.forward


class Compilers(ThreadPoolExecutor):
    """Threads that compile kernels until `stopped` is set; later ones fail at once."""

    def __init__(self, stopped: Event) -> None:
        super().__init__(os.cpu_count())
        self._stopped = stopped

    def submit(self, compile: Callable[[], Any], /, *_: Any, **__: Any) -> Future[Any]:
        return super().submit(self._compiled, compile)

    def _compiled(self, compile: Callable[[], Any]) -> Any:
        if self._stopped.is_set():
            raise CancelledError
        return compile()


# Held while kernels are compiled together, as `JITFunction.run` is another function then.
COMPILING = Lock()


@contextmanager
def compiled_together(stopped: Event | None = None) -> Iterator[None]:
    """Kernels that this thread launches inside are only compiled: their outputs have any values. All are ready afterwards.

    One that cannot be compiled, or was not when `stopped` was set, is compiled again when it is launched later. A launch after
    `stopped` was set raises CancelledError.
    """
    run, thread, launched, stopped = JITFunction.run, get_ident(), set[Any](), stopped or Event()

    def compile_only(kernel: Any, *args: Any, **options: Any) -> Any:
        if get_ident() != thread:
            return run(kernel, *args, **options)
        if stopped.is_set():
            raise CancelledError
        launched.add(kernel)
        return run(kernel, *args, **options | {"warmup": True})

    jit: Any = JITFunction
    with COMPILING:
        try:
            with Compilers(stopped) as threads, AsyncCompileMode(threads, ignore_errors=True):
                jit.run = compile_only
                try:
                    yield
                finally:
                    jit.run = run
        finally:
            for kernels in (caches[0] for kernel in launched for caches in kernel.device_caches.values()):
                for key in [key for key, each in kernels.items() if not isinstance(each, CompiledKernel)]:
                    del kernels[key]
