"""What loading and runners call of the compiled library."""

from __future__ import annotations

import torch

from outrider.verify.model.cpu.native.layers import NativeLinear
from outrider.verify.model.cpu.native.library import Engine, compiled_library
from outrider.verify.model.cpu.native.loading import can_compute, load, of_model
from outrider.verify.model.cpu.native.runner import NativeRunner
from outrider.verify.model.cpu.native.weights import BLOCK, Kind, Weights
from outrider.verify.model.packed import is_plain

__all__ = ["BLOCK", "NativeRunner", "can_compute", "compiled_library", "load", "of_model", "pack_layers", "quantized"]
# How weights of these types are packed.
KINDS = {torch.float32: Kind.FLOAT32, torch.bfloat16: Kind.BFLOAT16}


def quantized(linear: torch.nn.Linear, bits: int) -> NativeLinear:
    """The layer with weights of 8 or 4 bits, in blocks of BLOCK inputs. Requires `compiled_library`."""
    kind = Kind.INT4 if bits == 4 else Kind.INT8
    return NativeLinear(linear, Weights.of(Engine.shared(), kind, linear.weight.detach().float().numpy()))


def pack_layers(model: torch.nn.Module) -> None:
    """Packs the weights of linear layers on a CPU in place, if the library was compiled; other layers stay as they are."""
    if compiled_library() is None:
        return
    for name, module in list(model.named_modules()):
        if is_plain(module) and module.weight.device.type == "cpu" and module.weight.dtype in KINDS:
            kind = KINDS[module.weight.dtype]
            if kind.fits(module.in_features):
                weights = Weights.of(Engine.shared(), kind, module.weight.detach().float().numpy())
                model.set_submodule(name, NativeLinear(module, weights))
