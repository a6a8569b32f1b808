"""The tensors of a model as files store them, by the names that GGUF files have: mapped, and not copied. Imports no torch."""

import json
import mmap
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, GGMLQuantizationType, get_tensor_name_map, quants
from numpy.typing import NDArray

from outrider.verify.errors import ModelError
from outrider.verify.gguf.metadata import read_metadata
from outrider.verify.model.architecture.description import Architecture
from outrider.verify.model.experts import split_checkpoint, split_file
from outrider.verify.model.stored import Part, Stored, StoredType

# ggml's types by the names of safetensors.
TYPES = {"F32": GGMLQuantizationType.F32, "F16": GGMLQuantizationType.F16, "BF16": GGMLQuantizationType.BF16}
# Types of the parts of quantised weights, and their bytes.
PARTS: dict[str, tuple[StoredType, int]] = {
    **{name: (kind, quants.GGML_QUANT_SIZES[kind][1]) for name, kind in TYPES.items()},
    **{f"I{8 * size}": (GGMLQuantizationType[f"I{8 * size}"], size) for size in (1, 4, 8)},
    "U8": (Part.UINT8, 1),
    "F8_E8M0": (Part.UINT8, 1),
    "F8_E4M3": (Part.FLOAT8, 1),
}
HEADER = struct.Struct("<Q")
LAYER = re.compile(r"(?:\.layers|^blk)\.(\d+)\.")
ROUTER_SCALES = re.compile(r"\.layers\.(\d+)\.router\.(scale|per_expert_scale)$")
DENSE = re.compile(r"\.block_sparse_moe\.(gate|up|down)_proj\b")  # of Kimi Linear's layers without experts
# OLMo Hybrid's own names, of layers that keep a state.
OWN = {
    "input_layernorm": "attn_norm",
    "attention_layer_norm": "attn_norm",
    "feedforward_layer_norm": "post_attention_norm",
    "linear_attn.o_norm": "ssm_norm",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_proj": "ssm_dt",
    "linear_attn.a_proj": "ssm_alpha",
    "linear_attn.b_proj": "ssm_beta",
    "linear_attn.g_proj": "attn_gate",
    "linear_attn.o_proj": "attn_output",
    "linear_attn.conv1d": "ssm_conv1d",
    **{f"linear_attn.{part}_conv1d": f"ssm_conv1d_{part}" for part in "qkv"},
    **{f"linear_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
}
OWN_NAME = re.compile(r"^model\.layers\.(\d+)\.(.+?)(\.bias)?$")
RESIDUALS = re.compile(r"\.altup_(unembed_)?projections\.(\d+)\.weight$")
# The ends of names without a kind in files.
BARE = (".ssm_a", ".ssm_d", ".ffn_norm")
# The ends of names of scales of files' weights; those of routers and of experts' outputs; and those of activations.
SCALE, OTHER_SCALES, UNUSED = ".scale", (".ffn_gate_inp.scale", ".ffn_down_exps.scale"), (".input_scale",)
# The ends of names of tensors that are computed from the configuration.
COMPUTED = ("rotary_emb.inv_freq", "attn.masked_bias", "attention.masked_bias")


class Tensors(dict[str, Stored]):
    """Tensors by name. Raises ModelError for one that is missing."""

    def __init__(self, path: str, tensors: Mapping[str, Stored]) -> None:
        super().__init__(tensors)
        self.path = path

    def __missing__(self, name: str) -> Stored:
        raise ModelError(f"{self.path!r} has no tensor {name}; download it again, or serve another model.")


def read_gguf(files: Sequence[Path]) -> Tensors:
    """The tensors of a model in these GGUF files. Raises ModelError."""
    found: dict[str, Stored] = {}
    for file in files:
        found |= stored_in(file)
    return Tensors(str(files[0]), with_scales(str(files[0]), split_file(found)))


def stored_in(path: Path) -> dict[str, Stored]:
    """The tensors of a GGUF file, as it has them. Raises ModelError."""
    mapping, content = mapped(path)
    found = {}
    for name, tensor in read_metadata(path).tensors.items():
        try:
            kind = GGMLQuantizationType(tensor.kind)
            block, size = quants.GGML_QUANT_SIZES[kind]
            if block > 1 and not hasattr(quants, kind.name):  # in no file that llama.cpp writes for others
                raise ValueError
        except (ValueError, KeyError):
            raise ModelError(
                f"The tensor {name} of {str(path)!r} has a type of ggml that is not known ({tensor.kind}); serve another file."
            ) from None
        end = tensor.start + prod(tensor.shape) // block * size
        if not tensor.shape or tensor.shape[-1] % block or end > len(content):
            raise ModelError(f"{str(path)!r} ends within the tensor {name}; download the file again.")
        rows = content[tensor.start : end].reshape(prod(tensor.shape[:-1]), -1)
        found[f"{name}.weight" if name.endswith(BARE) else name] = Stored(rows, kind, tensor.shape, mapping)
    return found


def with_scales(path: str, tensors: dict[str, Stored]) -> dict[str, Stored]:
    """Weights of a file times their own scales, which each one or each expert may have. Raises ModelError."""
    scales = {name: each for name, each in tensors.items() if name.endswith(SCALE) and not name.endswith(OTHER_SCALES)}
    found = {name: each for name, each in tensors.items() if name not in scales and not name.endswith(UNUSED)}
    for name, scale in scales.items():
        stem, values = name.removesuffix(SCALE), scale.floats().reshape(-1)
        weights = [f"{stem}.{number}.weight" for number in range(len(values))]
        if len(values) == 1 and f"{stem}.weight" in found:
            weights = [f"{stem}.weight"]
        for each, value in zip(weights, values, strict=True):
            if each not in found:
                raise ModelError(f"The tensor {name} of {path!r} scales {each}, which is not there; serve another file.")
            found[each] = found[each].times(float(value))
    return found


def mapped(path: Path) -> tuple[mmap.mmap, NDArray[np.uint8]]:
    """A file in memory, and its bytes. Raises OSError and ValueError."""
    with path.open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return mapping, np.frombuffer(mapping, np.uint8)


def read_safetensors(path: str, files: Iterable[Path]) -> dict[str, Stored] | None:
    """The tensors of a checkpoint by their own names; None if one has another type. Raises ModelError."""
    found: dict[str, Stored] = {}
    for file in files:
        mapping, content = mapped(file)
        try:
            (length,) = HEADER.unpack_from(content[: HEADER.size].tobytes())
            head = json.loads(content[HEADER.size : HEADER.size + length].tobytes())
            start = HEADER.size + length
            for name, each in head.items():
                if name == "__metadata__":
                    continue
                if each["dtype"] not in PARTS:
                    return None
                shape, (first, end) = tuple(each["shape"]), each["data_offsets"]
                kind, size = PARTS[each["dtype"]]
                if end - first != prod(shape) * size or start + end > len(content):
                    raise ValueError(f"it ends within {name}")
                rows = content[start + first : start + end].reshape(prod(shape[:-1]), -1)
                found[name] = Stored(rows, kind, shape, mapping)
        except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
            raise ModelError(f"{str(file)!r} of the model {path!r} is damaged ({error}); download it again.") from None
    return found


def as_gguf(path: str, tensors: Mapping[str, Stored], architecture: Architecture) -> Tensors | None:
    """The tensors of a checkpoint by the names of GGUF files; None if one has none there.

    Further layers, which predict several tokens, are left out.
    """
    layers = len(architecture.layers)
    names = names_of(architecture.name, layers)
    found = {}
    for name, stored in split_checkpoint(tensors, architecture.turns_experts).items():
        number = LAYER.search(name)
        if name.endswith(COMPUTED) or (number is not None and int(number[1]) >= layers):
            continue
        known = file_name(names, name)
        if known is None:
            return None
        found[known] = stored
    return Tensors(path, found)


def names_of(name: str, layers: int) -> Any:
    """gguf's table of names of an architecture's tensors."""
    (arch,) = (key for key, each in MODEL_ARCH_NAMES.items() if each == name)
    return get_tensor_name_map(MODEL_ARCH(arch), layers)


def file_name(names: Any, name: str) -> str | None:
    """A checkpoint tensor's name in GGUF files, by a table of names; None if it is not there."""
    if (scale := ROUTER_SCALES.search(name)) is not None:
        return f"blk.{scale[1]}.{'ffn_gate_inp' if scale[2] == 'scale' else 'ffn_down_exps'}.scale"
    if (residual := RESIDUALS.search(name)) is not None:
        return f"altup_{'unembd_' if residual[1] else ''}proj.{residual[2]}.weight"
    name = renamed(name)
    known = name if name.startswith("blk.") else names.get_name(name, (".weight", ".bias"))
    if known is None and (own := OWN_NAME.match(name.removesuffix(".weight"))) and own[2] in OWN:
        known = f"blk.{own[1]}.{OWN[own[2]]}{own[3] or ''}"
    return known if known is None or known.endswith((".weight", ".bias")) else f"{known}.weight"


def renamed(name: str) -> str:
    """A name that GGUF's tables know."""
    name = DENSE.sub(r".mlp.\1_proj", name).replace(".forget_gate.", ".")
    name = name.replace(".gate.moe_statics.", ".moe_statics.").replace("_moe.router.weight", "_moe.router.layer.weight")
    if ".mixer." in name:
        name = name.replace("model.layers.", "backbone.layers.")
    name = name.replace(".dt_bias", ".dt_proj.bias").replace(".expert_bias", ".expert_bias.bias")
    return name.replace("e_score_correction_bias", "e_score_correction.bias")


def stored_tensor(tensor: Any) -> Stored | None:
    """A plain torch tensor of a float type; None for any other."""
    import torch  # only callers that have one

    kinds = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
    values = tensor.detach()
    if type(values) is not torch.Tensor or values.dtype not in kinds:
        return None
    values = values.contiguous()
    rows = values.view(torch.uint8).numpy().reshape(prod(values.shape[:-1]), -1)
    return Stored(rows, TYPES[kinds[values.dtype]], tuple(values.shape))
