"""What loading and runners call of the compiled library."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from outrider.verify.model.cache.shape import CacheShape
from outrider.verify.model.cpu.native.decoder import Decoder, is_supported
from outrider.verify.model.cpu.native.forward import STORED, NativeForward
from outrider.verify.model.cpu.native.layers import NativeLinear, pack_model
from outrider.verify.model.cpu.native.library import Engine, compiled_library, variant
from outrider.verify.model.cpu.native.weights import BLOCK, Kind, Weights
from outrider.verify.model.hidden.tap import HiddenTap

__all__ = [
    "BLOCK",
    "NativeForward",
    "build",
    "can_cache",
    "can_pack",
    "compiled_library",
    "pack",
    "quantized",
    "read_gguf",
    "supports",
    "variant",
]


def supports(name: str, config: PreTrainedConfig) -> bool:
    """Whether the library was compiled for this CPU and computes models of the class `name` with this configuration."""
    return compiled_library() is not None and is_supported(name, config)


def can_pack(model: PreTrainedModel) -> bool:
    """Whether the library computes this model's forward."""
    return model.device.type == "cpu" and supports(type(model).__name__, model.config)


def pack(model: PreTrainedModel) -> None:
    """Packs the model's weights in place. Requires `can_pack`."""
    pack_model(model, Engine.shared())


def read_gguf(file: Path) -> PreTrainedModel | None:
    """The model in a GGUF file with its blocks, packed; None if only transformers can load it. Raises ModelError."""
    if compiled_library() is None:
        return None
    from outrider.verify.model.cpu.native.gguf import load_gguf  # imports a package that only such files need

    return load_gguf(file, Engine.shared())


def quantized(linear: torch.nn.Linear, bits: int) -> NativeLinear:
    """The layer with weights of 8 or 4 bits, in blocks of BLOCK inputs. Requires `compiled_library`."""
    kind = Kind.INT4 if bits == 4 else Kind.INT8
    return NativeLinear(linear, Weights.of(Engine.shared(), kind, linear.weight.detach()))


def can_cache(shape: CacheShape) -> bool:
    """Whether the library reads and writes keys and values of this layout."""
    return shape.is_uniform and shape.stored_dtype in STORED


def build(model: PreTrainedModel, shape: CacheShape, threads: int, tap: HiddenTap | None = None) -> NativeForward:
    """The forward of a packed model. With `tap`, hidden states are kept."""
    windows = {index: layer.window for index, layer in enumerate(shape.layers)}
    return NativeForward(Decoder(model, windows), Engine(threads), tap)
