"""Quantised weights of checkpoints as one tensor for each layer. The tensors that a layer has say in which format it is.

Integers whose scales belong to groups, channels or tensors are repacked as blocks, and so are floats of 4 bits; this loses
nothing. float8 is exact where a channel or a tensor has one scale. Other weights are rounded to bfloat16. All of it happens
when a tensor's rows are read. Imports no torch.
"""

import json
from collections.abc import Callable, Mapping
from typing import TypeAlias

import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from outrider.verify.model.quantized.integers import (
    FLOAT8_VALUES,
    Computed,
    Integers,
    Parts,
    Settings,
    UnknownFormatError,
    floats,
    of_compressed,
    of_words,
    rounded,
)
from outrider.verify.model.stored import Part, Stored, halved

# The methods whose formats are read.
METHODS = {"auto-round", "awq", "bitsandbytes", "compressed-tensors", "fbgemm_fp8", "fp8", "gptq", "modelopt", "mxfp8", "quark"}
NESTED = (".weight.nested_absmax", ".weight.nested_quant_map")
TABLE = (".weight", ".weight.absmax", ".weight.quant_map")
# The begin of the name's end of what describes 4-bit weights of bitsandbytes.
STATE = ".weight.quant_state.bitsandbytes__"


def of_scaled(parts: Parts, settings: Settings) -> Stored:
    """Bytes, float8 or integers, with a scale for the tensor, for each output, or for each square of weights."""
    values, inputs = parts[".weight"], parts[".weight"].shape[-1]
    outputs = len(values.rows)
    scale = parts.get(".weight_scale") or parts[".weight_scale_inv"]
    scales = floats(scale)
    scales = scales.reshape(-1, scales.shape[-1] if scales.ndim > 1 else 1)
    if scales.size == 1:
        scales = scales.repeat(outputs, 0)
    if values.type == GGMLQuantizationType.I8 and len(scales) == outputs and not isinstance(scale.type, Part):
        return of_bytes(values, scales, parts.get(".weight_zero_point"))
    if values.type != Part.FLOAT8 or ".weight_zero_point" in parts:
        raise UnknownFormatError(f"weights of the type {values.type.name} with a {scale.type.name} scale are not known")
    if scales.shape == (outputs, 1):
        found = Computed(
            lambda: rounded(FLOAT8_VALUES[values.rows]), GGMLQuantizationType.BF16, (outputs, inputs), values.mapping
        )
        return found.times(scales)
    height, width = square_of(settings) or (outputs // len(scales), inputs // scales.shape[1])
    if scales.shape not in ((-(-outputs // height), -(-inputs // width)), (outputs, -(-inputs // width))):
        raise UnknownFormatError(f"scales of the shape {scales.shape} for weights of {outputs} x {inputs} are not known")
    height = height if len(scales) < outputs else 1

    def rows() -> NDArray[np.uint8]:
        found = FLOAT8_VALUES[values.rows]
        found *= scales.repeat(height, 0)[:outputs].repeat(width, 1)[:, :inputs]
        return rounded(found)

    return Computed(rows, GGMLQuantizationType.BF16, (outputs, inputs), values.mapping)


def square_of(settings: Settings) -> tuple[int, int] | None:
    """The size of what has a scale, if the configuration says it."""
    groups = [each.get("weights") or {} for each in (settings.get("config_groups") or {}).values()]
    sizes = [settings.get("weight_block_size"), *(each.get("block_structure") for each in groups)]
    height, width = next(filter(None, sizes), (0, 0))
    return (height, width) if height and width else None


def of_bytes(values: Stored, scales: NDArray[np.float32], zeros: Stored | None = None) -> Stored:
    """Integers of 8 bits with a sign, and scales [outputs, groups]."""
    middle: NDArray[np.int16] = np.full(scales.shape, 128, np.int16)
    if zeros is not None:
        middle = middle + zeros.rows.view(np.int8).reshape(len(zeros.rows), -1)
    return Integers(values.mapping, lambda: values.rows ^ np.uint8(128), middle, scales, 8, values.shape[1]).stored()


def of_bitsandbytes(parts: Parts, settings: Settings) -> Stored:
    """Integers of 8 bits, and the largest magnitude of each output."""
    return of_bytes(parts[".weight"], floats(parts[".SCB"]).reshape(-1, 1) / np.float32(127))


def of_four_bits(parts: Parts, settings: Settings) -> Stored:
    """Places in a table of 16 values, the first one in a byte's upper half. Scales may be places in a table themselves."""
    (state,) = (json.loads(each.rows.tobytes()) for end, each in parts.items() if end.startswith(STATE))
    values, table, scales = parts[".weight"], floats(parts[".weight.quant_map"]), parts[".weight.absmax"]
    outputs, inputs = state["shape"]

    def rows() -> NDArray[np.uint8]:
        if ".weight.nested_absmax" in parts:
            numbers = scales.rows.reshape(-1)
            blocks = np.arange(len(numbers)) // state["nested_blocksize"]
            largest = floats(parts[".weight.nested_quant_map"])[numbers] * floats(parts[".weight.nested_absmax"])[blocks]
            largest = largest + np.float32(state["nested_offset"])
        else:
            largest = floats(scales).reshape(-1)
        places = np.stack([values.rows >> 4, values.rows & 15], -1).reshape(-1)[: outputs * inputs]
        return rounded((table[places] * largest.repeat(state["blocksize"])[: len(places)]).reshape(outputs, inputs))

    return Computed(rows, GGMLQuantizationType.BF16, (outputs, inputs), values.mapping)


def of_mxfp4(parts: Parts, settings: Settings) -> Stored:
    """4-bit floats in pairs, and an exponent for each 32."""
    values, scales = parts[".weight_packed"], parts[".weight_scale"]
    outputs, inputs = values.shape[0], 2 * values.shape[1]
    if scales.type != Part.UINT8 or scales.shape != (outputs, inputs // 32):
        raise UnknownFormatError(f"4-bit floats with a {scales.type.name} scale are not known")

    def rows() -> NDArray[np.uint8]:
        return np.concatenate([scales.rows.reshape(-1, 1), halved(values.rows, 32)], 1).reshape(outputs, -1)

    return Computed(rows, GGMLQuantizationType.MXFP4, (outputs, inputs), values.mapping)


def of_nvfp4(parts: Parts, settings: Settings) -> Stored:
    """4-bit floats in pairs, a float8 scale for each 16, and a scale of the tensor, which multiplies or divides."""
    values = parts.get(".weight_packed") or parts[".weight"]
    scales, outputs, inputs = parts[".weight_scale"], values.shape[0], 2 * values.shape[1]
    if values.type != Part.UINT8 or scales.type != Part.FLOAT8 or scales.shape != (outputs, inputs // 16) or inputs % 64:
        raise UnknownFormatError(
            f"4-bit floats of {outputs} x {inputs} with {scales.type.name} scales of {scales.shape} are not known"
        )
    whole = parts.get(".weight_scale_2") or parts[".weight_global_scale"]
    scale = floats(whole) if ".weight_scale_2" in parts else np.reciprocal(floats(whole))

    def rows() -> NDArray[np.uint8]:
        found = [scales.rows.reshape(outputs, -1, 4), halved(values.rows, 16).reshape(outputs, -1, 32)]
        return np.concatenate(found, -1).reshape(outputs, -1)

    return Computed(rows, GGMLQuantizationType.NVFP4, (outputs, inputs), values.mapping).times(scale)


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
