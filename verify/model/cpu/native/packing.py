"""Packs single tensors of a model for the library, and keeps what its descriptions refer to."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from gguf import GGMLQuantizationType, quants
from numpy.typing import NDArray

from outrider.verify.errors import ModelError
from outrider.verify.model.architecture.description import Architecture, Layer
from outrider.verify.model.cpu.native import structures
from outrider.verify.model.cpu.native.library import Engine
from outrider.verify.model.cpu.native.packed_file import PackedFile
from outrider.verify.model.cpu.native.weights import Kind, Weights
from outrider.verify.model.stored import Stored
from outrider.verify.model.tensors import Tensors

PLAIN = (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16)


@dataclass(frozen=True)
class Precision:
    """The kinds to which a checkpoint's weights are rounded; None = as they are, in the library's form for them."""

    layers: Kind | None = None
    head: Kind | None = None
    rest: Kind | None = None  # the embedding table, and layers that `layers` does not fit


@dataclass
class Size:
    """Bytes and number of the weights that a step reads."""

    nbytes: int = 0
    weights: int = 0

    def add(self, weights: Weights) -> None:
        self.nbytes += weights.nbytes
        self.weights += weights.outputs * weights.inputs


class Packer:
    """Packs tensors of one model by their names in files."""

    def __init__(
        self, architecture: Architecture, tensors: Tensors, engine: Engine, precision: Precision, file: PackedFile
    ) -> None:
        self.architecture, self.tensors, self.engine, self.precision, self.file = architecture, tensors, engine, precision, file
        self.size, self.kept = Size(), list[object]()

    def has(self, name: str) -> bool:
        return f"{name}.weight" in self.tensors

    def linear(
        self,
        name: str,
        shape: tuple[int, int],
        rows: NDArray[np.int64] | slice | None = None,
        scale: float | NDArray[np.float32] = 1.0,
    ) -> structures.Linear:
        """A linear layer, of these rows, times `scale`. Raises ModelError unless its shape is [outputs, inputs]."""
        stored = self.tensors[f"{name}.weight"]
        if rows is not None:
            stored = self._taken(stored, rows, name)
        return structures.Linear(self.matrix(name, stored, shape, scale), self.vector(f"{name}.bias", shape[0], rows))

    def matrix(
        self, name: str, stored: Stored, shape: tuple[int, int], scale: float | NDArray[np.float32] = 1.0
    ) -> structures.Matrix:
        """A tensor's weights times `scale`. Raises ModelError unless its shape is this one, [outputs, inputs]."""
        self.check(name, stored, shape)
        fits = self.precision.layers is not None and self.precision.layers.fits(shape[1])
        kind = self.precision.layers if fits else self.precision.rest
        if not np.isscalar(scale) or scale != 1:
            stored = stored.times(scale)
        weights = Weights.stored(self.engine, stored, kind, self.file)
        self.kept.append(weights)
        self.size.add(weights)
        return weights.matrix

    def check(self, name: str, stored: Stored, shape: tuple[int, int]) -> None:
        """Raises ModelError unless the tensor has this shape."""
        if stored.shape != shape:
            found, expected = (" x ".join(map(str, each)) for each in (stored.shape, shape))
            raise ModelError(
                f"The tensor {name} of {self.tensors.path!r} is {found}, and its configuration says {expected}; download it"
                " again, or name another one."
            )

    def _taken(self, stored: Stored, rows: NDArray[np.int64] | slice, name: str) -> Stored:
        try:
            return stored.take(rows)
        except IndexError:
            raise ModelError(
                f"The tensor {name} of {self.tensors.path!r} is smaller than its configuration says; download it again, or name"
                " another one."
            ) from None

    def norm(self, name: str, *sizes: int) -> structures.Norm:
        """A norm of one of these sizes; of kind 0 if the model has none there. Raises ModelError."""
        if not self.has(name):
            return structures.Norm()
        size = self.tensors[f"{name}.weight"].shape[-1]
        add = 1.0 if self.architecture.norms_less_one else 0.0
        weight = self.keep(self.floats(f"{name}.weight", size if size in sizes else sizes[0]) + np.float32(add))
        return structures.Norm(weight, self.vector(f"{name}.bias", size), self.architecture.norm.value, size)

    def plain_norm(self, weights: NDArray[np.float32]) -> structures.Norm:
        return structures.Norm(self.keep(weights), None, self.architecture.norm.value, len(weights))

    def vector(self, name: str, count: int, rows: NDArray[np.int64] | slice | None = None) -> int | None:
        """The address of a vector as float32; None if the model has none. Raises ModelError if it has another size."""
        return self.keep(self.floats(name, count, rows)) if name in self.tensors else None

    def floats(
        self, names: str | Sequence[str], count: int, rows: NDArray[np.int64] | slice | None = None
    ) -> NDArray[np.float32]:
        """Values of a tensor, or of several one after the other, [count]. Raises ModelError if there is another number."""
        names = [names] if isinstance(names, str) else names
        stored = [self.tensors[name] if rows is None else self._taken(self.tensors[name], rows, name) for name in names]
        found = np.concatenate([each.floats().reshape(-1) for each in stored])
        if len(found) != count:
            raise ModelError(
                f"The tensor {' and '.join(names)} of {self.tensors.path!r} has {len(found)} values, and its configuration says"
                f" {count}; download it again, or name another one."
            )
        return found

    def keep(self, values: NDArray[np.float32]) -> int:
        """The address of an array's copy."""
        kept = np.array(values, np.float32, order="C")
        self.kept.append(kept)
        return int(kept.ctypes.data)

    def router(self, name: str, outputs: int) -> structures.Linear:
        """A small layer, whose products decide: in float32, whatever the others are rounded to."""
        values = self.floats(f"{name}.weight", outputs * self.architecture.hidden)
        weights = Weights.of(self.engine, Kind.FLOAT32, values.reshape(outputs, -1), self.file)
        self.kept.append(weights)
        return structures.Linear(weights.matrix, self.vector(f"{name}.bias", outputs))

    def multiplier(self, name: str) -> float:
        """The multiplier of a linear layer's outputs."""
        return self.architecture.multipliers.get(name, 1.0)


def stored_as(stored: Stored, values: NDArray[np.float32]) -> Stored:
    """Values that were computed from a tensor's, in its type; in bfloat16 if that is a quantised one."""
    kind = stored.type if stored.type in PLAIN else GGMLQuantizationType.BF16
    return Stored(quants.quantize(values, kind).view(np.uint8).reshape(len(values), -1), kind, values.shape)


def order(architecture: Architecture, layer: Layer, name: str, has_pairs: bool) -> NDArray[np.int64] | None:
    """The rows of a layer's queries or keys, so that values that are rotated together are half of what is rotated apart.

    None if they are, or if nothing is rotated. With `has_pairs`, they lie side by side.
    """
    if not has_pairs or layer.rotary is None:
        return None
    rotary, first, width = architecture.rotaries[layer.rotary].size, 0, layer.head_dim
    if layer.latent is not None:
        first = layer.latent.key_dim if name == "query" else layer.latent.rank
        width = first + rotary
    if architecture.name == "granitehybrid":  # its files, of Bamba, have whole heads in pairs
        rotary = width
    head = np.r_[0:first, first : first + rotary : 2, first + 1 : first + rotary : 2, first + rotary : width]
    heads = layer.heads if name == "query" else layer.kv_heads
    found: NDArray[np.int64] = (np.arange(heads)[:, None] * width + head).reshape(-1)
    return found
