"""Models whose weights a GPU takes as files have them: modules of transformers, filled layer by layer by the library's readers.

Quantised weights become blocks, and others numbers of the model's data type; so loading needs the quantised size and one layer
in the host's memory. Blocks are kept in a file, which later starts map. transformers itself reads what is not known here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, cast

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from outrider.verify.checkpoint import QUANTIZATION, Location
from outrider.verify.model.architecture.config import read_config
from outrider.verify.model.architecture.description import Architecture
from outrider.verify.model.architecture.rotary import frequencies
from outrider.verify.model.attention.interface import NAME
from outrider.verify.model.cpu.native.loading import TIED_HEAD, Source, read
from outrider.verify.model.cpu.native.packed_file import NOT_KEPT, PackedFile, file_of
from outrider.verify.model.cpu.native.packing import order
from outrider.verify.model.experts import expert_name
from outrider.verify.model.gpu.devices import Placement
from outrider.verify.model.gpu.experts import WEIGHTS, way_of
from outrider.verify.model.gpu.forms import BLOCK, ROUNDED, Form, common_form
from outrider.verify.model.gpu.quantized import CHUNK, BlockLinear, Blocks, joined_blocks
from outrider.verify.model.gpu.stored_blocks import KINDS, as_blocks
from outrider.verify.model.load_options import LoadOptions, Quantize
from outrider.verify.model.quantization import BITS, layer_bits
from outrider.verify.model.sizes import is_plain
from outrider.verify.model.stored import Stored
from outrider.verify.model.tensors import LAYER, file_name, names_of

log = logging.getLogger("outrider.worker")
# The version of the files of blocks. It changes with their layout.
FORMAT = 1
NORM, TABLE, HEAD = "norm.weight", "token_embd.weight", "output.weight"
# The parts of a mixture's weights, by the names of transformers.
EXPERTS = dict(zip(WEIGHTS, (("gate", "up"), ("down",)), strict=True))


def load(
    options: LoadOptions, location: Location, config: Any, dtype: torch.dtype, devices: Sequence[torch.device]
) -> PreTrainedModel | None:
    """The model at a location, on its devices; None if only transformers can read it.

    `config` is transformers' configuration of it. Raises ModelError.
    """
    source, keeps = read(options, location), options.dtype == "auto" and options.quantize == "none"
    if source is None:
        return None
    dtype = torch.bfloat16 if location.gguf is not None and options.dtype == "auto" else dtype

    def filled(file: PackedFile) -> PreTrainedModel:
        model = empty_model(config, dtype)
        found = FileModel(model, source, location.gguf is not None)
        bits = all_bits(options.quantize, model) if options.quantize != "none" else {}
        found.fill(Placement(model, devices), bits, keeps, file)
        model.generation_config.eos_token_id = sorted(source.ends)
        return model

    has_blocks = options.quantize != "none" or keeps
    path = file_of(
        options.packed_folder if has_blocks else None, source.files, "GPU", FORMAT, options.quantize, keeps, len(devices)
    )
    try:
        try:
            with PackedFile(path, sum(each.stat().st_size for each in source.files)) as file:
                return filled(file)
        except OSError as error:
            log.info(NOT_KEPT, error)
        return filled(PackedFile())
    except UnfitError:
        return None


class UnfitError(Exception):
    """Only transformers can read the model."""


class FileModel:
    """A model of transformers without weights, and the files' tensors that become its weights."""

    def __init__(self, model: PreTrainedModel, source: Source, is_file: bool) -> None:
        """`model` is on the meta device. With `is_file`, weights are those of a GGUF file. Raises UnfitError."""
        own, known = read_config(model.config.to_dict()), source.known
        if own is None or not is_read(own) or not is_read(known):
            raise UnfitError
        self.model, self.source, self.known = model, source, known
        self._names = names_of(known.name, len(known.layers))
        self._turns = is_file and known.has_pairs and not own.has_pairs
        self._less_one = is_file and own.norms_less_one
        self._modules = {module: name for name, module in model.named_modules()}
        for name, tensor in model.state_dict(keep_vars=True).items():
            parts = self.parts(name)
            if sum(prod(each.shape) for each in parts) != tensor.numel():
                raise UnfitError
        if is_file:
            self._set_rotary()

    def parts(self, name: str) -> list[Stored]:
        """The tensors, one after the other, of a parameter. Raises UnfitError."""
        tensors, layer = self.source.tensors, LAYER.search(name)
        if layer is not None and ".experts." in name:
            kinds = EXPERTS.get(name.rpartition(".")[2], ())
            count = 0 if self.known.mixture is None else self.known.mixture.experts
            names = [expert_name(layer[1], kind, number) for number in range(count) for kind in kinds]
        else:
            names = [TABLE if name == TIED_HEAD and HEAD not in tensors else str(file_name(self._names, name))]
        if not names or not tensors.keys() >= {*names}:
            raise UnfitError
        found = [tensors[each] for each in names]
        role = {"q_proj": "query", "k_proj": "key"}.get(name.split(".")[-2])
        if self._turns and role is not None and layer is not None:
            places = order(self.known, self.known.layers[int(layer[1])], role, True)
            found = found if places is None else [each.take(places) for each in found]
        return found

    def fill(self, placement: Placement, bits: dict[str, int], keeps: bool, file: PackedFile) -> None:
        """Puts the weights on their devices: rounded to `bits` by a layer's name, or as they are if it `keeps` them."""
        filled: dict[torch.Tensor, torch.nn.Parameter] = {}  # by the tensors that they replace; some are shared
        for device, modules in placement.modules.items():
            for module in modules:
                self._fill_module(module, device, bits, keeps, file, filled)

    def _fill_module(
        self, module: Any, device: torch.device, bits: dict[str, int], keeps: bool, file: PackedFile, filled: Any
    ) -> None:
        place, mixture = self._modules[module], way_of(module) is not None
        for name, tensor in module._buffers.items():
            if tensor is None:
                continue
            if name in module._non_persistent_buffers_set:
                module._buffers[name] = tensor.to(device)
            else:
                module._buffers[name] = self._numbers(self.parts(f"{place}.{name}"), name, tensor, device)
        for name, tensor in [*module._parameters.items()][::-1]:  # a bias before the layer that takes it
            if tensor is None:
                continue
            parts = self.parts(f"{place}.{name}")
            form = self._form(parts, bits.get(place), keeps) if mixture or (is_plain(module) and name == "weight") else None
            if form is not None:
                blocks = Weight(parts, form, bits.get(place), file).on(device)
                if mixture:
                    delattr(module, name)
                    setattr(module, name, BlockLinear.of(blocks, tensor.dtype))
                else:
                    self.model.set_submodule(place, BlockLinear(module, blocks))
                continue
            if tensor not in filled:
                numbers = self._numbers(parts, f"{place}.{name}", tensor, device)
                filled[tensor] = torch.nn.Parameter(numbers, requires_grad=False)
            module._parameters[name] = filled[tensor]

    def _form(self, parts: Sequence[Stored], bits: int | None, keeps: bool) -> Form | None:
        """The form of a weight's blocks; None if it becomes numbers."""
        forms = [form_of(each, bits, keeps) for each in parts]
        return None if None in forms else common_form(each for each in forms if each is not None)

    def _numbers(self, parts: Sequence[Stored], name: str, like: torch.Tensor, device: torch.device) -> torch.Tensor:
        """A tensor's numbers, of the type and shape of `like`."""
        less = 1.0 if self._less_one and name.endswith(NORM) else 0.0
        pieces = [(piece - less).to(device, like.dtype).flatten() for each in parts for piece in numbers_of(each)]
        return torch.cat(pieces).view(like.shape)

    def _set_rotary(self) -> None:
        """The frequencies of a single table of positions, which a file may scale as its configuration does not say."""
        module: Any = getattr(self.model.get_decoder(), "rotary_emb", None)
        if len(self.known.rotaries) == 1 and hasattr(module, "inv_freq"):
            values, scaling = frequencies(self.known.rotaries[0], self.known.context_tokens)
            module.inv_freq, module.attention_scaling = torch.from_numpy(values), scaling
            module.rope_type = "default"


class Weight:
    """The quantised weights of a layer."""

    def __init__(self, parts: Sequence[Stored], form: Form, bits: int | None, file: PackedFile) -> None:
        self.parts, self.form, self.bits, self._file = parts, form, bits, file

    def on(self, device: torch.device) -> Blocks:
        """The blocks: of the file, if there is one."""
        if not self._file.is_mapped:
            return self._made(device)
        outputs, inputs = sum(each.shape[0] for each in self.parts), self.parts[0].shape[1]
        size = sum(prod(shape) * dtype.itemsize for dtype, shape in self.form.planes(outputs, inputs))

        def made(_: Any) -> Iterator[Any]:
            yield self._made(device).bytes.cpu().numpy()

        content = torch.from_numpy(np.array(self._file.take(size, made)))
        return Blocks.of_bytes(content.to(device), self.form, outputs, inputs)

    def _made(self, device: torch.device) -> Blocks:
        return joined_blocks([each for part in self.parts for each in self._of_part(part, device)]).widened(self.form)

    def _of_part(self, part: Stored, device: torch.device) -> Iterator[Blocks]:
        if self.bits is not None:
            yield from (Blocks.of(piece.to(device), self.bits) for piece in numbers_of(part))
            return
        rows, scales = part.rows, part.scales
        for first in range(0, len(rows), CHUNK):
            some = slice(first, first + CHUNK)
            own = None if scales is None else torch.from_numpy(scales[some]).to(device)
            yield as_blocks(torch.from_numpy(np.array(rows[some])).to(device), KINDS[part.type], own)
        part.release()


def is_read(architecture: Architecture) -> bool:
    """Whether all tensors of such a decoder are the same in files and in transformers, but for those that are turned."""
    others = architecture.embedding_width, architecture.residuals, architecture.turns_experts
    return not any(others) and all(each.recurrence is None and each.latent is None for each in architecture.layers)


def all_bits(quantize: Quantize, model: PreTrainedModel) -> dict[str, int]:
    """The bits of linear layers' weights and of experts by the names of their modules."""
    experts = (name for name, module in model.named_modules() if way_of(module) is not None)
    return layer_bits(quantize, model) | dict.fromkeys(experts, BITS[quantize])


def form_of(stored: Stored, bits: int | None, keeps: bool) -> Form | None:
    """The form of a tensor's blocks; None if it becomes numbers."""
    if bits is not None:
        return None if stored.shape[-1] % BLOCK else ROUNDED[bits]
    kind = KINDS.get(stored.type) if keeps else None
    return None if kind is None or stored.shape[-1] % kind.inputs else kind.form


def numbers_of(stored: Stored) -> Iterator[torch.Tensor]:
    """The numbers of some rows after the others, float32."""
    for first in range(0, len(stored.rows), CHUNK):
        yield torch.from_numpy(np.array(stored.floats(first, first + CHUNK)))
        stored.release()


def empty_model(config: Any, dtype: torch.dtype) -> PreTrainedModel:
    """A model on the meta device, but for what is computed from its configuration."""
    if hasattr(config, QUANTIZATION):
        delattr(config, QUANTIZATION)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=NAME).eval()
    for module in model.modules():
        computed = {*module._buffers} & module._non_persistent_buffers_set
        for name in computed:
            module._buffers[name] = torch.empty_like(module._buffers[name], device="cpu")
        if computed:
            model._init_weights(module)
    return cast(PreTrainedModel, model)
