"""The tensors of a model as files store them, by the names that GGUF files have: mapped, and not copied. Imports no torch."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, GGMLQuantizationType, get_tensor_name_map, quants
from numpy.typing import NDArray

from outrider.verify.errors import ModelError
from outrider.verify.gguf.metadata import Metadata

# ggml's types by the names of safetensors.
TYPES = {"F32": GGMLQuantizationType.F32, "F16": GGMLQuantizationType.F16, "BF16": GGMLQuantizationType.BF16}
HEADER = struct.Struct("<Q")
# The ends of names of tensors that are computed from the configuration.
COMPUTED = ("rotary_emb.inv_freq", "attn.masked_bias", "attention.masked_bias")


@dataclass(frozen=True, eq=False)
class Stored:
    """A tensor: rows of values, or of quantised blocks."""

    rows: NDArray[np.uint8]  # [rows, bytes]
    type: GGMLQuantizationType
    shape: tuple[int, ...]

    def take(self, places: NDArray[np.int64] | slice) -> Stored:
        """Some of the rows. Of a vector, some of the values."""
        if len(self.shape) == 1:
            width = self.rows.shape[1] // self.shape[0]
            values = self.rows.reshape(-1, width)[places]
            return replace(self, rows=values.reshape(1, -1), shape=(len(values),))
        found = self.rows[places]
        return replace(self, rows=found, shape=(len(found), *self.shape[1:]))

    def floats(self, start: int = 0, end: int | None = None) -> NDArray[np.float32]:
        """The values of rows as float32, of the tensor's shape."""
        rows = self.rows[start:end]
        values = quants.dequantize(np.ascontiguousarray(rows), self.type).astype(np.float32, copy=False)
        found: NDArray[np.float32] = values.reshape(self.shape if len(self.shape) == 1 else (len(rows), *self.shape[1:]))
        return found


class Tensors(dict[str, Stored]):
    """Tensors by name. Raises ModelError for one that is missing."""

    def __init__(self, path: str, tensors: Mapping[str, Stored]) -> None:
        super().__init__(tensors)
        self.path = path

    def __missing__(self, name: str) -> Stored:
        raise ModelError(f"{self.path!r} has no tensor {name}; download it again, or serve another model.")


def read_gguf(path: Path, metadata: Metadata) -> Tensors:
    """The tensors of a GGUF file. Raises ModelError."""
    content: NDArray[np.uint8] = np.memmap(path, np.uint8, "r")
    found = {}
    for name, tensor in metadata.tensors.items():
        try:
            kind = GGMLQuantizationType(tensor.kind)
            block, size = quants.GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            raise ModelError(
                f"The tensor {name} of {str(path)!r} has a type of ggml that is not known ({tensor.kind}); serve another file."
            ) from None
        end = tensor.start + prod(tensor.shape) // block * size
        if not tensor.shape or tensor.shape[-1] % block or end > len(content):
            raise ModelError(f"{str(path)!r} ends within the tensor {name}; download the file again.")
        rows = content[tensor.start : end].reshape(prod(tensor.shape[:-1]), -1)
        found[name] = Stored(rows, kind, tensor.shape)
    return Tensors(str(path), found)


def read_safetensors(path: str, files: Iterable[Path]) -> dict[str, Stored] | None:
    """The tensors of a checkpoint by their own names; None if one has a type that is not one of TYPES. Raises ModelError."""
    found: dict[str, Stored] = {}
    for file in files:
        content: NDArray[np.uint8] = np.memmap(file, np.uint8, "r")
        try:
            (size,) = HEADER.unpack_from(content[: HEADER.size].tobytes())
            head = json.loads(content[HEADER.size : HEADER.size + size].tobytes())
            start = HEADER.size + size
            for name, each in head.items():
                if name == "__metadata__":
                    continue
                if each["dtype"] not in TYPES:
                    return None
                shape, (first, end) = tuple(each["shape"]), each["data_offsets"]
                kind = TYPES[each["dtype"]]
                if end - first != prod(shape) * quants.GGML_QUANT_SIZES[kind][1] or start + end > len(content):
                    raise ValueError(f"it ends within {name}")
                rows = content[start + first : start + end].reshape(prod(shape[:-1]), -1)
                found[name] = Stored(rows, kind, shape)
        except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
            raise ModelError(f"{str(file)!r} of the model {path!r} is damaged ({error}); download it again.") from None
    return found


def as_gguf(path: str, tensors: Mapping[str, Stored], architecture: str, layers: int) -> Tensors | None:
    """The tensors of a checkpoint by the names of GGUF files; None if one has none there."""
    (arch,) = (key for key, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = get_tensor_name_map(MODEL_ARCH(arch), layers)
    found = {}
    for name, stored in tensors.items():
        if name.endswith(COMPUTED):
            continue
        known = names.get_name(name, (".weight", ".bias"))
        if known is None:
            return None
        found[known] = stored
    return Tensors(path, found)


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
