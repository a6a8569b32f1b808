"""The tensors of files that become the parameters of transformers' modules, which may have them in other orders and in one."""

from collections.abc import Callable, Iterator
from functools import cached_property
from math import prod
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from gguf import GGMLQuantizationType
from numpy.typing import NDArray
from transformers import PreTrainedModel

from outrider.verify.model.architecture.description import Architecture, Latent, Layer, Recurrence
from outrider.verify.model.cpu.native import parts as tensor_names
from outrider.verify.model.cpu.native.loading import TIED_HEAD, Source
from outrider.verify.model.cpu.native.packed_file import PackedFile
from outrider.verify.model.cpu.native.packing import order as rotated
from outrider.verify.model.experts import split_checkpoint
from outrider.verify.model.gpu.experts import WEIGHTS, way_of
from outrider.verify.model.gpu.quantized import CHUNK
from outrider.verify.model.quantized.integers import Computed
from outrider.verify.model.stored import Stored
from outrider.verify.model.tensors import LAYER, file_name, names_of

NORM, GATED_NORM, DECAYS = "norm.weight", ".linear_attn.norm.weight", ".A_log"
TABLE, HEAD, SCALINGS = "token_embd.weight", "output.weight", "rope_f"
# Tensors one after the other, and their rows in a parameter's order; None = as they are.
Parts: TypeAlias = tuple[list[Stored], NDArray[np.int64] | None]
# Of tensors with values of each head of a state, those that have `value_dim` of them, and those that have one.
WIDE = {tensor_names.FUSED, tensor_names.STATE_GATE, tensor_names.CONVOLUTION}
NARROW = {tensor_names.ALPHA, tensor_names.BETA, tensor_names.DECAY, tensor_names.STEP}

# What a tensor of some files is in others.
APART = {
    tensor_names.BOTH_UP: (tensor_names.KEY_UP, tensor_names.VALUE_UP),
    tensor_names.STATE_INPUT: (tensor_names.FUSED, tensor_names.STATE_GATE),
    tensor_names.BOTH: (tensor_names.BETA, tensor_names.ALPHA),
    tensor_names.CONVOLUTION: tensor_names.CONVOLUTIONS,
}


class UnfitError(Exception):
    """Only transformers can read the model."""


class FileTensors:
    """A model's tensors by the names of transformers' parameters."""

    has_computed = False  # buffers that no file has

    def __init__(self, own: Architecture, source: Source, is_file: bool) -> None:
        """`own` is what the model's configuration describes. With `is_file`, the tensors are those of a GGUF file."""
        self.known, self._tensors, self._is_file = source.known, source.tensors, is_file
        self._names = names_of(self.known.name, len(self.known.layers))
        self._turns = is_file and self.known.has_pairs and not own.has_pairs
        self._less_one, self._turns_experts = is_file and own.norms_less_one, own.turns_experts

    def check(self, parameters: dict[str, torch.Tensor]) -> None:
        """Raises UnfitError unless the tensors make these parameters, and no file has others."""
        used = set[int]()
        for name, tensor in parameters.items():
            parts, _ = self.parts(name, tensor)
            if sum(prod(each.shape) for each in parts) != tensor.numel():
                raise UnfitError(name)
            used |= {id(part) for each in parts for part in getattr(each, "sources", [each])}
        for name, each in self._tensors.items() if self._is_file else ():
            layer = LAYER.search(name)
            is_further = layer is not None and int(layer[1]) >= len(self.known.layers)
            if id(each) not in used and not is_further and not name.startswith(SCALINGS):
                raise UnfitError(name)

    def parts(self, name: str, tensor: torch.Tensor) -> Parts:
        """What a parameter is made of. Raises UnfitError."""
        split = split_checkpoint({name: numbered(name, tensor, self._is_turned(tensor))}, self._turns_experts)
        names = [
            TABLE if each == TIED_HEAD and HEAD not in self._tensors else str(file_name(self._names, each)) for each in split
        ]
        if len(names) == 1 and names[0] not in self._tensors and (layer := self._layer(names[0])) is not None:
            return self._joined(names[0], layer)
        if not self._tensors.keys() >= {*names}:
            raise UnfitError(name)
        numbers = np.concatenate([each.rows.view(np.int32).reshape(-1) for each in split.values()])
        found = [self._tensors[each] for each in names]
        if (layer := self._layer(names[0])) is not None:
            role = {"q_proj": "query", "k_proj": "key"}.get(name.split(".")[-2])
            if self._turns and role is not None:
                return found, rotated(self.known, layer, role, True)
            if layer.recurrence is not None and layer.recurrence.is_tiled:
                return found, grouped(layer.recurrence, names[0].split(".")[2], len(numbers))
        return found, None if (np.diff(numbers) == 1).all() else np.argsort(numbers)

    def _layer(self, name: str) -> Layer | None:
        found = LAYER.search(name)
        return None if found is None else self.known.layers[int(found[1])]

    def _joined(self, name: str, layer: Layer) -> Parts:
        """A parameter that files have in several tensors. Raises UnfitError."""
        _, number, kind, *_ = name.split(".")
        wanted = [f"blk.{number}.{each}.weight" for each in APART.get(kind, ())]
        if not wanted or not self._tensors.keys() >= {*wanted}:
            raise UnfitError(name)
        found = [self._tensors[each] for each in wanted]
        if layer.latent is not None:
            keys, values = found
            return [Ups(keys, values, layer.heads, layer.latent)], None
        assert layer.recurrence is not None
        return found, None if kind == tensor_names.CONVOLUTION else by_key_heads(layer.recurrence, kind == tensor_names.BOTH)

    def inputs(self, name: str) -> NDArray[np.int64] | None:
        """The inputs of a layer's weights in a file's order; None = as they are."""
        known = str(file_name(self._names, name))
        layer = self._layer(known)
        if layer is None or layer.recurrence is None or not layer.recurrence.is_tiled or tensor_names.STATE_OUTPUT not in known:
            return None
        heads, keys, width = layer.recurrence.heads, layer.recurrence.key_heads, layer.recurrence.value_dim
        return widened(np.arange(heads).reshape(keys, -1).T.reshape(-1), width)

    def _is_turned(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is [experts, inputs, outputs]."""
        return self._turns_experts and tensor.ndim == 3

    def numbers(self, name: str, like: torch.Tensor, device: torch.device) -> torch.Tensor:
        """A parameter's numbers, of the type and shape of `like`."""
        parts, order = self.parts(name, like)
        less = 1.0 if self._less_one and name.endswith(NORM) and not name.endswith(GATED_NORM) else 0.0
        pieces = [piece - less for each in parts for piece in numbers_of(each)]
        if self._is_file and name.endswith(DECAYS):
            pieces = [torch.log(-each) for each in pieces]
        found = torch.cat([each.to(device, like.dtype).flatten() for each in pieces])
        if order is not None:
            found = found.view(len(order), -1)[torch.from_numpy(order).to(device)]
        if self._is_turned(like):
            found = found.view(like.shape[0], like.shape[2], -1).transpose(1, 2)
        return found.reshape(like.shape)


class LoadedTensors:
    """The tensors of a model that only transformers reads, which it does only if `file` does not have them yet."""

    has_computed = True

    def __init__(self, model: PreTrainedModel, reads: Callable[[], PreTrainedModel], file: PackedFile) -> None:
        """`model` is the one on the meta device, and `reads` gives it with its weights."""
        self._reads, self._file = reads, file
        mixtures = [(name, each) for name, each in model.named_modules() if way_of(each) is not None]
        self._turned = {f"{name}.{weight}" for name, each in mixtures if cast(Any, each).is_transposed for weight in WEIGHTS}

    @cached_property
    def _tensors(self) -> dict[str, torch.Tensor]:
        model = self._reads()
        found: dict[str, torch.Tensor] = model.state_dict()
        return found | dict(model.named_buffers())

    def parts(self, name: str, tensor: torch.Tensor) -> Parts:
        """As of `FileTensors`."""

        def rows() -> NDArray[np.uint8]:
            weight = self._tensors[name].float()
            turned = weight.transpose(-1, -2) if name in self._turned else weight
            return turned.contiguous().view(torch.uint8).numpy().reshape(shape[0], -1)

        *outer, last = tensor.shape if name not in self._turned else tensor.transpose(-1, -2).shape
        shape = (prod(outer), last)
        return [Computed(rows, GGMLQuantizationType.F32, shape, None)], None

    def inputs(self, name: str) -> None:
        """As of `FileTensors`."""

    def numbers(self, name: str, like: torch.Tensor, device: torch.device) -> torch.Tensor:
        """As of `FileTensors`."""

        def made(_: Any) -> Iterator[NDArray[np.uint8]]:
            yield self._tensors[name].to(like.dtype).reshape(-1).view(torch.uint8).numpy()

        if not self._file.is_mapped:
            return self._tensors[name].to(device, like.dtype)
        content = torch.from_numpy(np.array(self._file.take(like.nbytes, made)))
        return content.view(like.dtype).view(like.shape).to(device)


class Ups(Computed):
    """The weights that make keys and values of latents, [heads * (key_dim + value_dim), rank], of a file that has them apart.

    Those of keys are transposed there, so that blocks lie along their outputs: they are no blocks of this layer.
    """

    def __init__(self, keys: Stored, values: Stored, heads: int, latent: Latent) -> None:
        def rows() -> NDArray[np.uint8]:
            of_keys = keys.floats().reshape(heads, latent.rank, latent.key_dim).swapaxes(1, 2)
            both = np.concatenate([of_keys, values.floats().reshape(heads, latent.value_dim, latent.rank)], 1)
            return np.ascontiguousarray(both).reshape(-1, latent.rank).view(np.uint8)

        shape = (heads * (latent.key_dim + latent.value_dim), latent.rank)
        super().__init__(rows, GGMLQuantizationType.F32, shape, keys.mapping)
        object.__setattr__(self, "sources", [keys, values])


def widened(places: NDArray[np.int64], width: int) -> NDArray[np.int64]:
    """The places of heads' values, by those of heads."""
    found: NDArray[np.int64] = (places[:, None] * width + np.arange(width)).reshape(-1)
    return found


def grouped(known: Recurrence, kind: str, rows: int) -> NDArray[np.int64] | None:
    """The rows of a tensor whose heads take turns among key heads, so that those of a key head are together."""
    if kind not in WIDE | NARROW:
        return None
    heads = np.arange(known.heads).reshape(-1, known.key_heads).T.reshape(-1)
    places = widened(heads, known.value_dim if kind in WIDE else 1)
    before = rows - len(places)
    found: NDArray[np.int64] = np.r_[0:before, before + places]
    return found


def by_key_heads(known: Recurrence, is_narrow: bool) -> NDArray[np.int64]:
    """The rows of queries, keys, values and gates, or of corrections and steps, as one key head after another has them."""
    inner = known.heads * known.value_dim
    sizes = [known.heads] * 2 if is_narrow else [known.key_heads * known.key_dim] * 2 + [inner] * 2
    sections = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    found: NDArray[np.int64] = np.concatenate([each.reshape(known.key_heads, -1) for each in sections], 1).reshape(-1)
    return found


def numbered(name: str, tensor: torch.Tensor, is_turned: bool) -> Stored:
    """A tensor whose values are the numbers of a parameter's outputs, in one column, or if it `is_turned` in one row."""
    shape = [*tensor.shape] or [1]
    if is_turned:
        shape[1] = 1
    elif len(shape) > 1 and not name.endswith("_bias"):
        shape[-1] = 1
    values = np.arange(prod(shape), dtype=np.int32).view(np.uint8)
    return Stored(values.reshape(prod(shape[:-1]), -1), GGMLQuantizationType.F32, tuple(shape))


def numbers_of(stored: Stored) -> Iterator[torch.Tensor]:
    """The numbers of some rows after the others, float32."""
    read = stored.take(slice(None))  # once, if its rows are computed
    for first in range(0, len(read.rows), CHUNK):
        yield torch.from_numpy(np.array(read.floats(first, first + CHUNK)))
        stored.release()
