"""TorchScript, which PyTorch has deprecated: functions and traces of models that run without Python.

Tested with PyTorch 2.13. `tests/verify/model/cpu/test_torchscript.py` fails if something that is used here is missing.

Without TorchScript, `outrider.verify.model.cpu.trace.trace` has to return None: every model is then computed by Python, with
the same logits. Small models lose most, since Python takes about as long as their layers; those of
`outrider.verify.model.cpu.native` lose nothing. PyTorch's replacement is `torch.export` with AOTInductor, which has not been
tried here.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch

_JIT = cast(Any, torch.jit)

# TorchScript's own type of list. A forward that releases a Python list takes the global interpreter lock once for each tensor,
# and waits each time for the threads that hold it.
ScriptList: Any = torch.ScriptList


def script(function: Callable[..., Any]) -> Any:
    """Compiles a function, and those that it calls. Raises RuntimeError."""
    return _JIT.script(function)


def traced(module: torch.nn.Module, arguments: tuple[Any, ...]) -> Any:
    """Records what the module computes of these arguments. Raises RuntimeError.

    What depends on the weights alone is computed now, and the layers are inlined.
    """
    found = _JIT.trace(module, arguments, check_trace=False)
    return _JIT.freeze(found.eval(), optimize_numerics=False)


def run(found: Any, *arguments: Any) -> Any:
    """Runs a trace as it is: the profiling executor would stall the first requests."""
    with _JIT.optimized_execution(False):
        return found(*arguments)


@contextmanager
def without_warnings() -> Iterator[None]:
    """Leaves out the warnings that TorchScript is deprecated, and those of traces, which must be checked by their results."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", _JIT.TracerWarning)
        yield
