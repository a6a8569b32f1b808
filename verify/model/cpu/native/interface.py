"""What loading and runners call of the compiled library."""

from __future__ import annotations

import torch

from outrider.verify.model.cpu.native.layers import NativeLinear
from outrider.verify.model.cpu.native.library import Engine, compiled_library
from outrider.verify.model.cpu.native.loading import can_compute, load, of_model
from outrider.verify.model.cpu.native.runner import NativeRunner
from outrider.verify.model.cpu.native.weights import BLOCK, Kind, Weights

__all__ = ["BLOCK", "NativeRunner", "can_compute", "compiled_library", "load", "of_model", "quantized"]


def quantized(linear: torch.nn.Linear, bits: int) -> NativeLinear:
    """The layer with weights of 8 or 4 bits, in blocks of BLOCK inputs. Requires `compiled_library`."""
    kind = Kind.INT4 if bits == 4 else Kind.INT8
    return NativeLinear(linear, Weights.of(Engine.shared(), kind, linear.weight.detach().float().numpy()))
