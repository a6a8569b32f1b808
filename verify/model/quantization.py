"""Weights of fewer bits: which layers are quantised, to what, and how, one by one, while a model loads.

On a CPU, the layers of `outrider.verify.model.cpu.native`; on a GPU, those of `outrider.verify.model.gpu.quantized`, which have
the same weights up to ties, and are quantised after loading. transformers documents how a quantizer is registered, but not the
conversion of weights while they are read (`ConversionOps`) and the mark `_is_hf_initialized`. Tested with transformers 5.23, by
`tests/verify/model/test_quantization.py`. Without them, a model is quantised after it was loaded, by `quantize_layers`, and has
to fit into memory unquantised.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import GgufConfig, QuantizationConfigMixin

from outrider.verify.checkpoint import Location, check_packages, quantization_method
from outrider.verify.errors import ModelError
from outrider.verify.model.cpu.native import interface as native
from outrider.verify.model.gpu.devices import Placement
from outrider.verify.model.gpu.quantized import quantized
from outrider.verify.model.load_options import Quantization, Quantize
from outrider.verify.model.packed import is_plain, packed_layers
from outrider.verify.model.sizes import text_modules

# The name of the quantizer below in transformers' registry.
METHOD = "outrider"
# The bits of a weight.
BITS: dict[Quantize, int] = {"int8": 8, "int4": 4}
HEAD_BITS = 8
CPU = torch.device("cpu")
# Formats that have no kernels for CPUs, and that transformers can unpack.
DEQUANTIZED = ("compressed-tensors", "fp8")


def check_quantization(quantization: Quantization, device: torch.device) -> None:
    """Raises ModelError if the device cannot compute with such weights."""
    if quantization and device.type == "cpu" and native.compiled_library() is None:
        raise ModelError("model.quantize needs Outrider's compiled library; install a C++ compiler, and then Outrider again.")


def layer_bits(quantization: Quantization, model: PreTrainedModel) -> dict[str, int]:
    """The bits of linear layers' weights by name. The others stay as they are, as do those that read pictures."""
    texts, head = set(text_modules(model).modules()), model.get_output_embeddings()
    return {
        name: HEAD_BITS if module is head else BITS[quantization.layers]
        for name, module in model.named_modules()
        if is_plain(module) and module in texts and not module.in_features % native.BLOCK
    }


def quantize_layers(
    model: PreTrainedModel,
    quantization: Quantization,
    device: torch.device,
    modules: Iterable[torch.nn.Module] | None = None,
) -> None:
    """Quantises the linear layers in place that are not quantised yet. Raises ModelError if the model has none.

    With `modules`, only those.
    """
    if not quantization:
        return
    among = None if modules is None else set(modules)
    for name, bits in layer_bits(quantization, model).items():
        if among is None or model.get_submodule(name) in among:
            _replace(model, name, bits, device)
    if not packed_layers(model):
        raise ModelError("The checkpoint's layers are quantised already; set model.quantize to none.")


def _replace(model: PreTrainedModel, name: str, bits: int, device: torch.device = CPU) -> None:
    linear = model.get_submodule(name)
    assert isinstance(linear, torch.nn.Linear)
    layer = native.quantized(linear, bits) if device.type == "cpu" else quantized(linear, bits, device)
    layer.weight._is_hf_initialized = True  # type: ignore[attr-defined]  # no model initialises it after loading
    model.set_submodule(name, layer)


class _Settings(QuantizationConfigMixin):  # type: ignore[misc]
    """What `from_pretrained` passes to the quantizer."""

    def __init__(self, quantization: Quantization) -> None:
        self.quant_method, self.quantization = METHOD, quantization


class _Quantizer(HfQuantizer):  # type: ignore[misc]
    """Quantises each layer's weight as soon as it is read, so that memory never holds the unquantised model."""

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **_: Any) -> None:
        # A tied head's weights are the embedding table; it is quantised after loading.
        tied = {*model.all_tied_weights_keys, *model.all_tied_weights_keys.values()}
        quantization: Quantization = self.quantization_config.quantization
        weights = {f"{name}.weight": bits for name, bits in layer_bits(quantization, model).items()}
        self._bits = {name: bits for name, bits in weights.items() if name not in tied}

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **_: Any) -> bool:
        return param_name in self._bits

    def get_quantize_ops(self) -> ConversionOps:
        return _Convert(self._bits)

    def is_serializable(self, *_: Any) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False


class _Convert(ConversionOps):  # type: ignore[misc]
    """Replaces the layer that a weight is read for."""

    def __init__(self, bits: dict[str, int]) -> None:
        self._bits = bits

    @torch.no_grad()
    def convert(
        self, input_dict: dict[str, Any], full_layer_name: str, model: PreTrainedModel, missing_keys: set[str], **_: Any
    ) -> dict[str, torch.Tensor]:
        (weight,) = input_dict.values()
        name = full_layer_name.removesuffix(".weight")
        linear, bits = model.get_submodule(name), self._bits[full_layer_name]
        assert isinstance(linear, torch.nn.Linear)
        linear.weight = torch.nn.Parameter(weight[0] if isinstance(weight, list) else weight, requires_grad=False)
        _replace(model, name, bits)
        missing_keys.discard(full_layer_name)
        return {}  # nothing is left to set


register_quantization_config(METHOD)(_Settings)
register_quantizer(METHOD)(_Quantizer)


def loading_arguments(
    path: str, config: Any, location: Location, quantization: Quantization, device: torch.device
) -> dict[str, Any]:
    """Further arguments of `from_pretrained`. Raises ModelError if the checkpoint's format needs a package."""
    if location.gguf is not None:
        # The kernels for its blocks are downloaded code; weights are unpacked instead.
        return location.arguments | {"quantization_config": GgufConfig(dequantize=True)}
    method = quantization_method(config)
    if method is not None:
        check_packages(path, method)
        if method in DEQUANTIZED and (quantization or device.type == "cpu"):
            config.quantization_config["dequantize"] = True
        return {}
    return {"quantization_config": _Settings(quantization)} if quantization and device.type == "cpu" else {}


def finish_quantization(model: PreTrainedModel, quantization: Quantization, placement: Placement) -> None:
    """Quantises the rest of a loaded model. Raises ModelError if the model has no layers to quantise."""
    quantizer = getattr(model, "hf_quantizer", None)
    if isinstance(quantizer, _Quantizer):
        quantizer.remove_quantization_config(model)
    for device, modules in placement.modules.items():
        quantize_layers(model, quantization, device, modules)
