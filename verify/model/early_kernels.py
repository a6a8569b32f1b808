"""Compiles the kernels of a model while its weights load: those of a sketch, which has a layer of each kind, without weights.

Whatever fails here, the kernels are compiled when they are launched.
"""

from __future__ import annotations

import gc
import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from threading import Event, Thread
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from outrider.verify.checkpoint import Location
from outrider.verify.model.cpu.native.loading import Source, read
from outrider.verify.model.cpu.native.packed_file import PackedFile, Parts
from outrider.verify.model.file_model import FileModel, all_bits, empty_model, keeps_blocks, type_of
from outrider.verify.model.gpu.compilation import LAYER_NUMBERS, compiled_together
from outrider.verify.model.gpu.devices import Placement, decoder_layers
from outrider.verify.model.gpu.ranks import split_model
from outrider.verify.model.load_options import LoadOptions
from outrider.verify.model.tensors import LAYER
from outrider.verify.model.torch_runner import TorchRunner
from outrider.verify.model.transfer import on_device
from outrider.verify.start_times import timed

log = logging.getLogger("outrider.worker")
# The most layers of a sketch: they need memory while the load begins.
MOST_LAYERS = 8


class Unread(PackedFile):
    """A file whose weights are zero."""

    is_mapped = True

    def take(self, size: int, parts: Parts) -> NDArray[np.uint8]:
        return np.zeros(size, np.uint8)


class Sketch:
    """A model with only the first layer of each kind."""

    def __init__(
        self,
        options: LoadOptions,
        config: Any,
        dtype: torch.dtype,
        devices: Sequence[torch.device],
        source: Source | None,
        is_file: bool,
    ) -> None:
        """`source` has the weights, unless only transformers reads them; `is_file` as in `FileModel`.

        transformers changes PyTorch's default data type while it makes a model, so the thread that loads makes this one, too.
        Raises ModelError if the layers are not found.
        """
        self._options, self._devices, self._is_split = options, devices, "+" in options.device
        self._model = empty_model(config, dtype)
        if source is None:
            self._file = FileModel.of_loaded(self._model, Unread(), lambda: self._model, devices[0])
        else:
            self._file = FileModel.of(self._model, source, is_file, devices[0])
        layers = decoder_layers(self._model)
        kinds = kinds_of(layers, source)
        # How many layers of each kind a device has, by the number of the first: kernels depend on the size of a page of all.
        self._alike = [
            Counter(kind for layer, kind in zip(layers, kinds, strict=True) if layer in modules)
            for modules in map(set, Placement(self._model, devices[:1] if self._is_split else devices).modules.values())
        ]
        self.layers = sorted({*kinds})[:MOST_LAYERS]
        shorten(self._model, self.layers)

    def filled(self) -> PreTrainedModel:
        """The model on the first device, or split over all. Weights have the forms that loading gives them, and are zero."""
        options, tensors = self._options, cast(Any, self._file.tensors)
        tensors.numbers = lambda _, like, device: torch.zeros_like(like, device=device)
        bits = all_bits(options.quantize, self._model) if options.quantize != "none" else {}
        place = torch.device("cpu") if self._is_split else self._devices[0]
        self._file.fill(Placement(self._model, [place]), bits, keeps_blocks(options), Unread())
        if self._is_split:
            split_model(self._model, self._devices)
        return self._model

    def run(self) -> None:
        """Runs its forward for all numbers of rows."""
        options = self._options
        with on_device(self._devices[0]):
            runner = TorchRunner(self.filled(), options.context_tokens, started=False, kv_dtype=options.kv_dtype)
            for alike in self._alike:
                runner.run_all(alike)


def kinds_of(layers: Iterable[torch.nn.Module], source: Source | None) -> list[int]:
    """For each layer, the first one of its kind: of equal modules, with weights of equal types."""
    tensors = defaultdict[int, set[tuple[Any, ...]]](set)
    for name, each in {} if source is None else source.tensors.items():
        if (found := LAYER.match(name)) is not None:
            tensors[int(found[1])].add((name[found.end() :], each.type, each.scales is None))
    first = dict[Any, int]()
    modules = [frozenset(described(layer)) for layer in layers]
    return [first.setdefault((each, frozenset(tensors[number])), number) for number, each in enumerate(modules)]


def described(layer: torch.nn.Module) -> Iterator[tuple[Any, ...]]:
    """The modules of a layer: names, classes, shapes of weights, and all settings but the layer's number."""
    for name, module in layer.named_modules():
        weights = [(each, weight.shape) for each, weight in module.named_parameters(recurse=False)]
        settings = [(key, value) for key, value in vars(module).items() if isinstance(value, str | int | float)]
        yield name, type(module), *weights, *(each for each in settings if each[0] not in LAYER_NUMBERS)


def shorten(model: PreTrainedModel, numbers: Sequence[int]) -> None:
    """Removes the layers of a model but for these. They keep their names."""
    layers = decoder_layers(model)
    for number in {*range(len(layers))} - {*numbers}:
        del layers._modules[str(number)]
    config = model.config.get_text_config()
    if types := vars(config).get("layer_types"):
        config.layer_types = [types[number] for number in numbers]


@contextmanager
def compiled_beside(
    options: LoadOptions, location: Location, config: Any, dtype: torch.dtype, devices: Sequence[torch.device], by_file: bool
) -> Iterator[None]:
    """Compiles the kernels of a model that is loaded inside, in threads that end with the context.

    With `by_file`, `outrider.verify.model.file_model` reads it. A failure leaves the kernels to their first launch.
    """
    stopped, sketch = Event(), None

    def compile(sketch: Sketch) -> None:
        try:
            with timed("compiling kernels beside the load"), compiled_together(stopped):
                sketch.run()
                gc.collect()  # the load needs the memory
                torch.cuda.empty_cache()
        except Exception:
            log.debug("kernels are not compiled beside the load", exc_info=True)

    try:
        if options.trust_remote_code:
            raise ValueError("the model has code of its own")
        source = read(options, location) if by_file else None
        if by_file and source is None and options.quantize == "none":
            raise ValueError("only transformers reads the model")
        sketch = Sketch(options, config, type_of(options, location, dtype), devices, source, location.gguf is not None)
    except Exception as error:
        log.debug("kernels are not compiled beside the load: %s", error)
    if sketch is None:
        yield
        return
    thread = Thread(target=compile, args=(sketch,), daemon=True, name="outrider-kernels")
    thread.start()
    try:
        yield
        if thread.is_alive():
            log.info("waiting for kernels; the first start of a model compiles them, which may take minutes")
        thread.join()
    finally:
        stopped.set()
        thread.join()
