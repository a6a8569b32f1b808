"""Weights of fewer bits: which layers of a loaded model are quantised, and to what.

On a CPU, by the layers of `outrider.verify.model.cpu.native`; on a GPU, by those of `outrider.verify.model.gpu.quantized`:
their weights are the same up to ties.
"""

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils.quantization_config import GgufConfig

from outrider.verify.checkpoint import QUANTIZATION, Location
from outrider.verify.errors import ModelError
from outrider.verify.model.cpu.native.layers import packed
from outrider.verify.model.cpu.native.library import compiled_library
from outrider.verify.model.cpu.native.weights import BLOCK, Kind
from outrider.verify.model.gpu.devices import Placement
from outrider.verify.model.gpu.experts import quantize_experts, way_of
from outrider.verify.model.gpu.quantized import quantized
from outrider.verify.model.load_options import Quantize
from outrider.verify.model.sizes import is_plain, packed_layers, text_modules

# The bits of a weight.
BITS: dict[Quantize, int] = {"int8": 8, "int4": 4}
HEAD_BITS = 8
KINDS = {8: Kind.INT8, 4: Kind.INT4}  # of the library
# Formats that have no kernels for CPUs, and that transformers can unpack.
DEQUANTIZED = ("compressed-tensors", "fp8")


def check_quantization(quantize: Quantize, device: torch.device) -> None:
    """Raises ModelError if the device cannot compute with such weights."""
    if quantize != "none" and device.type == "cpu" and compiled_library() is None:
        raise ModelError("model.quantize needs Outrider's compiled library; install a C++ compiler, and then Outrider again.")


def layer_bits(quantize: Quantize, model: PreTrainedModel) -> dict[str, int]:
    """The bits of linear layers' weights by name. The others stay as they are, as do those that read pictures."""
    texts, head = set(text_modules(model).modules()), model.get_output_embeddings()
    return {
        name: HEAD_BITS if module is head else BITS[quantize]
        for name, module in model.named_modules()
        if is_plain(module) and module in texts and not module.in_features % BLOCK
    }


def quantize_model(model: PreTrainedModel, quantize: Quantize, placement: Placement) -> None:
    """Quantises the linear layers of a loaded model that are not quantised yet, and on a GPU the experts of mixtures, in place.

    Raises ModelError if the model has no linear layers to quantise.
    """
    if quantize == "none":
        return
    for device, modules in placement.modules.items():
        for module in modules if device.type != "cpu" else ():
            if way_of(module) is not None:
                quantize_experts(module, BITS[quantize], device)
        among = set(modules)
        for name, bits in layer_bits(quantize, model).items():
            linear = model.get_submodule(name)
            if linear in among:
                assert isinstance(linear, torch.nn.Linear)
                layer = packed(linear, KINDS[bits]) if device.type == "cpu" else quantized(linear, bits, device)
                model.set_submodule(name, layer)
    if not packed_layers(model):
        raise ModelError("The checkpoint's layers are quantised already; set model.quantize to none.")


def loading_arguments(config: Any, location: Location, unpacks: bool) -> dict[str, Any]:
    """Further arguments of `from_pretrained`; with `unpacks`, formats without kernels for CPUs are unpacked."""
    if location.gguf is not None:
        # The kernels for its blocks are downloaded code; weights are unpacked instead.
        return location.arguments | {"quantization_config": GgufConfig(dequantize=True)}
    settings = getattr(config, QUANTIZATION, None)
    if unpacks and isinstance(settings, dict) and settings.get("quant_method") in DEQUANTIZED:
        settings["dequantize"] = True
    return {}
