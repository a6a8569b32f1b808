"""Quantised weights of checkpoints as one tensor for each layer. The tensors that a layer has say in which format it is.

Integers whose scales belong to groups, channels or tensors are repacked as blocks, and so are floats of 4 bits; this loses
nothing. float8 is exact where a channel or a tensor has one scale. Other weights are rounded to bfloat16. All of it happens
when a tensor's rows are read. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from gguf import GGMLQuantizationType

from outrider.verify.model.quantized.integers import Parts, Settings, UnknownFormatError, of_compressed, of_words
from outrider.verify.model.quantized.scaled import STATE, of_bitsandbytes, of_four_bits, of_mxfp4, of_nvfp4, of_scaled
from outrider.verify.model.stored import Part, Stored

# The methods whose formats are read.
METHODS = {"auto-round", "awq", "bitsandbytes", "compressed-tensors", "fbgemm_fp8", "fp8", "gptq", "modelopt", "mxfp8", "quark"}
NESTED = (".weight.nested_absmax", ".weight.nested_quant_map")
TABLE = (".weight", ".weight.absmax", ".weight.quant_map")
Reader: TypeAlias = Callable[[Parts, Settings], Stored]
# The formats: what tensors a layer has, which further ones it may have, and what reads them.
FORMATS: tuple[tuple[tuple[str, ...], tuple[str, ...], Reader], ...] = (
    ((".qweight", ".qzeros", ".scales"), (".g_idx",), of_words),
    ((".weight_packed", ".weight_scale", ".weight_shape"), (".weight_zero_point", ".weight_g_idx"), of_compressed),
    ((".weight_packed", ".weight_scale", ".weight_global_scale"), (), of_nvfp4),
    ((".weight", ".weight_scale", ".weight_scale_2"), (), of_nvfp4),
    ((".weight_packed", ".weight_scale"), (), of_mxfp4),
    ((".weight", ".weight_scale"), (".weight_zero_point",), of_scaled),
    ((".weight", ".weight_scale_inv"), (), of_scaled),
    ((".weight", ".SCB"), (), of_bitsandbytes),
    ((*TABLE, STATE + "nf4"), NESTED, of_four_bits),
    ((*TABLE, STATE + "fp4"), NESTED, of_four_bits),
)
# The ends of names of tensors that are for activations and caches, which keep their precision here.
UNUSED: tuple[str, ...] = (
    ".input_scale",
    ".input_global_scale",
    ".input_zero_point",
    ".activation_scale",
    ".output_scale",
    ".weight_format",
)
UNUSED += (".q_scale", ".k_scale", ".v_scale")
# The scales of AWQ's inputs, by ModelOpt, are known so that nobody takes them for something else.
ENDS = {*UNUSED, ".pre_quant_scale", *(end for needed, more, _ in FORMATS for end in (*needed, *more))}


def whole_layers(tensors: Mapping[str, Stored], settings: Settings) -> dict[str, Stored]:
    """The tensors with one for each layer.

    Raises UnknownFormatError; KeyError, ValueError, and IndexError for tensors that do not belong together.
    """
    if (settings.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise UnknownFormatError("sparse weights are not known")
    if settings.get("transform_config"):
        raise UnknownFormatError("weights that are transformed are not known")
    layers: dict[str, dict[str, Stored]] = {}
    for name, stored in tensors.items():
        end = max((end for end in ENDS if name.endswith(end)), key=len, default="")
        if end not in UNUSED:
            layers.setdefault(name.removesuffix(end), {})[end] = stored
    found = {}
    for layer, parts in layers.items():
        (end, stored), *others = parts.items()
        is_whole = not others and end in ("", ".weight")
        if is_whole and not isinstance(stored.type, Part) and stored.type != GGMLQuantizationType.I8:
            found[layer + end] = stored
        else:
            found[f"{layer}.weight"] = reader_of(layer, parts)(parts, settings)
    return found


def reader_of(layer: str, parts: Parts) -> Reader:
    """What reads a layer with these tensors. Raises UnknownFormatError, and KeyError if one of a format is missing."""
    among = [(needed, read) for needed, more, read in FORMATS if parts.keys() <= {*needed, *more}]
    for needed, read in among:
        if parts.keys() >= {*needed}:
            return read
    if among and len(parts) > 1:
        raise KeyError(f"{layer}{min({*among[0][0]} - parts.keys())}")
    raise UnknownFormatError(f"{layer} has {' and '.join(sorted(parts))}, which are not known together")
