"""Models whose weights a GPU takes as files have them: modules of transformers, filled layer by layer by the library's readers.

Quantised weights become blocks, and others numbers of the model's data type; so loading needs the quantised size and one layer
in the host's memory. Blocks are kept in a file, which later starts map. transformers itself reads what is not known here; all
weights of such a model are kept if they are rounded.
"""

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from copy import deepcopy
from fnmatch import fnmatchcase
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from outrider.verify.checkpoint import QUANTIZATION, READERS, Location
from outrider.verify.model.architecture.config import read_config
from outrider.verify.model.architecture.description import Architecture
from outrider.verify.model.architecture.rotary import frequencies
from outrider.verify.model.attention.interface import NAME
from outrider.verify.model.cpu.native.loading import Source, files_of, read
from outrider.verify.model.cpu.native.packed_file import NOT_KEPT, PackedFile, file_of
from outrider.verify.model.file_tensors import FileTensors, LoadedTensors, UnfitError, numbers_of
from outrider.verify.model.gpu.devices import Placement
from outrider.verify.model.gpu.experts import WEIGHTS, way_of
from outrider.verify.model.gpu.forms import BLOCK, ROUNDED, Form, common_form
from outrider.verify.model.gpu.quantized import CHUNK, BlockLinear, Blocks, joined_blocks
from outrider.verify.model.gpu.stored_blocks import KINDS, as_blocks
from outrider.verify.model.load_options import LoadOptions, Quantize
from outrider.verify.model.quantization import BITS, layer_bits
from outrider.verify.model.sizes import is_plain
from outrider.verify.model.stored import Stored

log = logging.getLogger("outrider.worker")
# The version of the files of blocks. It changes with their layout.
FORMAT = 2


def load(
    options: LoadOptions,
    location: Location,
    config: Any,
    dtype: torch.dtype,
    devices: Sequence[torch.device],
    maker: torch.device,
    reads: Callable[[], PreTrainedModel] | None = None,
) -> PreTrainedModel | None:
    """The model at a location, on its devices; None if only transformers can read it.

    `config` is transformers' configuration of it, and `maker` the device that rounds weights. With `reads`, transformers reads
    what is not known here, unless an earlier start has kept it. Raises ModelError.
    """
    source, is_file = read(options, location), location.gguf is not None
    try:
        if source is not None:
            own = type_of(options, location, dtype)
            model = filled(
                options, source.files, config, own, devices, lambda model, _: FileModel.of(model, source, is_file, maker)
            )
            return with_ends(model, source.ends)
    except UnfitError as error:
        log.debug("files do not have %s as transformers does", error)
    if reads is None:
        return None
    files, ends = files_of(options, location)
    found = partial(FileModel.of_loaded, reads=reads, maker=maker)
    return with_ends(filled(options, files, config, dtype, devices, found), ends)


def with_ends(model: PreTrainedModel, ends: Collection[int] | None) -> PreTrainedModel:
    """The model, which ends answers with these tokens; None = those of its configuration."""
    if ends is not None:
        cast(Any, model).generation_config.eos_token_id = sorted(ends)
    return model


def filled(
    options: LoadOptions,
    files: Sequence[Path],
    config: Any,
    dtype: torch.dtype,
    devices: Sequence[torch.device],
    found: Callable[[PreTrainedModel, PackedFile], "FileModel"],
) -> PreTrainedModel:
    """A model with its weights on the devices, which are `found` for it and a file; the file is written if it is new."""
    keeps = keeps_blocks(options)

    def fill(file: PackedFile) -> PreTrainedModel:
        each = found(empty_model(config, dtype), file)
        bits = all_bits(options.quantize, each.model) if options.quantize != "none" else {}
        each.fill(Placement(each.model, devices), bits, keeps, file)
        return each.model

    folder = options.packed_folder if options.quantize != "none" or keeps else None
    kind = FORMAT, options.quantize, keeps, dtype, len(devices), config.to_json_string()  # which names transformers' version
    path = file_of(folder, files, "GPU", *kind)
    try:
        with PackedFile(path, sum(each.stat().st_size for each in files)) as file:
            return fill(file)
    except OSError as error:
        log.info(NOT_KEPT, error)
    return fill(PackedFile())


def keeps_blocks(options: LoadOptions) -> bool:
    """Whether blocks stay as files have them."""
    return options.dtype == "auto" and options.quantize == "none"


def type_of(options: LoadOptions, location: Location, dtype: torch.dtype) -> torch.dtype:
    """The model's data type; `dtype` is that of a checkpoint."""
    return torch.bfloat16 if location.gguf is not None and options.dtype == "auto" else dtype


class FileModel:
    """A model of transformers without weights, and the files' tensors that become its weights."""

    def __init__(self, model: PreTrainedModel, tensors: FileTensors | LoadedTensors, maker: torch.device) -> None:
        """`model` is on the meta device, and `maker` makes blocks."""
        self.model, self.tensors, self._maker = model, tensors, maker
        self._modules = {module: name for name, module in model.named_modules()}

    @staticmethod
    def of(model: PreTrainedModel, source: Source, is_file: bool, maker: torch.device) -> "FileModel":
        """With `is_file`, weights are those of a GGUF file. Raises UnfitError."""
        own = read_config(model.config.to_dict())
        if own is None:
            raise UnfitError(model.config.model_type)
        tensors = FileTensors(own, source, is_file)
        tensors.check(model.state_dict(keep_vars=True))
        if is_file:
            set_rotary(model, source.known)
        return FileModel(model, tensors, maker)

    @staticmethod
    def of_loaded(
        model: PreTrainedModel, file: PackedFile, reads: Callable[[], PreTrainedModel], maker: torch.device
    ) -> "FileModel":
        """With the weights of the model that transformers `reads`, which it does only if `file` does not have them yet."""
        return FileModel(model, LoadedTensors(model, reads, file), maker)

    def fill(self, placement: Placement, bits: dict[str, int], keeps: bool, file: PackedFile) -> None:
        """Puts the weights on their devices: rounded to `bits` by a layer's name, or as they are if it `keeps` them."""
        filled: dict[torch.Tensor, torch.nn.Parameter] = {}  # by the tensors that they replace; some are shared
        for device, modules in placement.modules.items():
            for module in modules:
                self._fill_module(module, device, bits, keeps, file, filled)
                name = self._modules[module]
                if isinstance(module, torch.nn.Linear) and (order := self.tensors.inputs(f"{name}.weight")) is not None:
                    reorder(self.model.get_submodule(name), torch.from_numpy(order).to(device))

    def _fill_module(
        self, module: Any, device: torch.device, bits: dict[str, int], keeps: bool, file: PackedFile, filled: Any
    ) -> None:
        place, mixture = self._modules[module], way_of(module) is not None
        for name, tensor in module._buffers.items():
            if tensor is None:
                continue
            if name in module._non_persistent_buffers_set and not self.tensors.has_computed:
                module._buffers[name] = tensor.to(device)
            else:
                module._buffers[name] = self.tensors.numbers(f"{place}.{name}", tensor, device)
        for name, tensor in [*module._parameters.items()][::-1]:  # a bias before the layer that takes it
            if tensor is None:
                continue
            parts, order = self.tensors.parts(f"{place}.{name}", tensor)
            is_product = name in WEIGHTS if mixture else name == "weight" and is_plain(module)
            form = self._form(parts, bits.get(place), keeps) if is_product else None
            if form is not None:
                blocks = Weight(parts, order, form, bits.get(place), self._maker, file).on(device)
                if mixture:
                    delattr(module, name)
                    setattr(module, name, BlockLinear.of(blocks, tensor.dtype))
                else:
                    self.model.set_submodule(place, BlockLinear(module, blocks))
                continue
            if tensor not in filled:
                numbers = self.tensors.numbers(f"{place}.{name}", tensor, device)
                filled[tensor] = torch.nn.Parameter(numbers, requires_grad=False)
            module._parameters[name] = filled[tensor]

    def _form(self, parts: Sequence[Stored], bits: int | None, keeps: bool) -> Form | None:
        """The form of a weight's blocks; None if it becomes numbers."""
        forms = [form_of(each, bits, keeps) for each in parts]
        return None if None in forms else common_form(each for each in forms if each is not None)


class Weight:
    """The quantised weights of a layer."""

    def __init__(
        self,
        parts: Sequence[Stored],
        order: NDArray[np.int64] | None,
        form: Form,
        bits: int | None,
        maker: torch.device,
        file: PackedFile,
    ) -> None:
        self.parts, self.order, self.form, self.bits, self._maker, self._file = parts, order, form, bits, maker, file

    def on(self, device: torch.device) -> Blocks:
        """The blocks: of the file, if there is one."""
        outputs, inputs = sum(each.shape[0] for each in self.parts), self.parts[0].shape[1]
        size = sum(prod(shape) * dtype.itemsize for dtype, shape in self.form.planes(outputs, inputs))

        def made(_: Any) -> Iterator[Any]:
            yield self._made().bytes.cpu().numpy()

        is_mapped = self._file.is_mapped
        content = torch.from_numpy(np.array(self._file.take(size, made))) if is_mapped else self._made().bytes
        return Blocks.of_bytes(content.to(device), self.form, outputs, inputs)

    def _made(self) -> Blocks:
        found = joined_blocks([each for part in self.parts for each in self._of_part(part)]).widened(self.form)
        return found if self.order is None else found.take(torch.from_numpy(self.order).to(self._maker))

    def _of_part(self, part: Stored) -> Iterator[Blocks]:
        device = self._maker
        if self.bits is not None:
            yield from (Blocks.of(piece.to(device), self.bits) for piece in numbers_of(part))
            return
        rows, scales = part.rows, part.scales
        for first in range(0, len(rows), CHUNK):
            some = slice(first, first + CHUNK)
            own = None if scales is None else torch.from_numpy(scales[some]).to(device)
            yield as_blocks(torch.from_numpy(np.array(rows[some])).to(device), KINDS[part.type], own)
        part.release()


def set_rotary(model: PreTrainedModel, known: Architecture) -> None:
    """Sets the frequencies of a single table of positions, which a file may scale as its configuration does not say."""
    module: Any = getattr(model.get_decoder(), "rotary_emb", None)
    if len(known.rotaries) == 1 and hasattr(module, "inv_freq"):
        values, scaling = frequencies(known.rotaries[0], known.context_tokens)
        module.inv_freq, module.attention_scaling = torch.from_numpy(values), scaling
        module.rope_type = "default"


def reorder(layer: torch.nn.Module, order: torch.Tensor) -> None:
    """Gives a layer its inputs in the order of its weights."""
    layer.register_forward_pre_hook(lambda _, inputs: (inputs[0].index_select(-1, order),))


def all_bits(quantize: Quantize, model: PreTrainedModel) -> dict[str, int]:
    """The bits of linear layers' weights and of experts by the names of their modules."""
    experts = (name for name, module in model.named_modules() if way_of(module) is not None)
    return layer_bits(quantize, model) | dict.fromkeys(experts, BITS[quantize])


def form_of(stored: Stored, bits: int | None, keeps: bool) -> Form | None:
    """The form of a tensor's blocks; None if it becomes numbers."""
    if bits is not None:
        return None if stored.shape[-1] % BLOCK else ROUNDED[bits]
    kind = KINDS.get(stored.type) if keeps else None
    if kind is None or stored.shape[-1] % kind.inputs:
        return None
    return kind.form if stored.scales is None else kind.form._replace(factors=torch.float32)


def class_of(config: Any) -> tuple[Any, dict[str, str]]:
    """transformers' class of a model, and the attention of its parts: what reads pictures keeps its own."""
    kind = AutoModelForImageTextToText if config.model_type in READERS else AutoModelForCausalLM
    return kind, {"": NAME, "text_config": NAME}


def empty_model(config: Any, dtype: torch.dtype) -> PreTrainedModel:
    """A model on the meta device, but for what is computed from its configuration. `_get_dtype_plan` is transformers' own."""
    config = deepcopy(config)
    if hasattr(config, QUANTIZATION):
        delattr(config, QUANTIZATION)
    with torch.device("meta"):
        kind, attention = class_of(config)
        model: Any = kind.from_config(config, dtype=dtype, attn_implementation=attention).eval()
    for module in model.modules():
        for name in {*module._buffers} & module._non_persistent_buffers_set:
            module._buffers[name] = torch.empty_like(module._buffers[name], device="cpu")
    for module in model.modules():
        is_whole = isinstance(module, PreTrainedModel)  # which may compute what its modules have
        if is_whole or module._non_persistent_buffers_set:
            cast(PreTrainedModel, module if is_whole else model)._init_weights(module)
    exact = model._get_dtype_plan(dtype)  # such as the biases of routers
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if any(fnmatchcase(name, f"*{pattern}*") for pattern in exact):
            tensor.data = tensor.data.float()
    return cast(PreTrainedModel, model)
