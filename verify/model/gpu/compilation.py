"""torch.compile for the layers of a model, with options of `torch._dynamo`, which is private.

They are the base class of the compiler's errors and two settings. `_no_split_modules`, which names the classes of layers, is
private to transformers. Tested with PyTorch 2.13 and transformers 5.23. `tests/verify/model/gpu/test_compilation.py` fails if
a name is missing.

Without the error's class, every exception of the first forward has to count as a failed compilation. Without the settings,
each layer is compiled on its own, or falls back to Python after a few; `model.compile: off` serves any model, without fused
kernels. Without the layers' names, the whole model is compiled at once, which takes longer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch._dynamo
from transformers import PreTrainedModel

from outrider.verify.model.recurrent.mixers import Mixer

# The limit of variants of a layer (by kind of layer and number of rows) that torch.compile may make.
RECOMPILE_LIMIT = 64
# Without `allow_unspec_int_on_nn_module`, torch.compile would specialise each layer on its index.
SETTINGS = {"allow_unspec_int_on_nn_module": True, "recompile_limit": RECOMPILE_LIMIT}

CompileError = torch._dynamo.exc.TorchDynamoException


def layers_of(model: PreTrainedModel) -> list[torch.nn.Module]:
    """What is compiled: the layers, and the norms beside them, such as the last one."""
    names = model._no_split_modules or ()
    layers = [module for module in model.modules() if type(module).__name__ in names]
    beside = [module for module in model.get_decoder().children() if "Norm" in type(module).__name__] if layers else []
    return [*layers, *beside]


@contextmanager
def compiled_layers(model: PreTrainedModel, backend: Any = "inductor") -> Iterator[None]:
    """Runs the model's layers through torch.compile inside the context; fused kernels make a captured step faster.

    Compiles layer by layer: the layers of a model are alike, so the code for one serves the others and any number of rows but
    one. The numbers are `dynamic` from the first on, since code of its own for one of them may compute rows with other bits.
    Recurrent parts of layers, which count their calls, are left out. The first forward raises CompileError if the model cannot
    be compiled.
    """
    mixers = [module for module in model.modules() if isinstance(module.forward, Mixer)]
    forwards = [module.forward for module in mixers]
    layers = layers_of(model) or [model]
    for module, forward in zip(mixers, forwards, strict=True):
        module.forward = torch.compiler.disable(forward)
    for layer in layers:
        layer.forward = torch.compile(layer.forward, backend=backend, dynamic=True)
    try:
        with torch._dynamo.config.patch(SETTINGS):
            yield
    finally:
        for layer in layers:
            del layer.forward
        for module, forward in zip(mixers, forwards, strict=True):
            module.forward = forward
