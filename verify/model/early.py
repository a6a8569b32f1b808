"""Compiles the kernels of a model while its weights load: those of a sketch, which has a layer of each kind, without weights.

Only of models that `outrider.verify.model.gpu.decoder` computes on one GPU. Whatever fails here, the kernels are compiled when
they are launched.
"""

from __future__ import annotations

import gc
import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from threading import Event, Thread
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from outrider.verify.checkpoint import Location
from outrider.verify.model.architecture.config import read_config
from outrider.verify.model.architecture.description import Architecture
from outrider.verify.model.cpu.native.loading import Source, read
from outrider.verify.model.cpu.native.packed_file import PackedFile, Parts
from outrider.verify.model.file_model import FileModel, all_bits, empty_model, keeps_blocks, type_of
from outrider.verify.model.gpu.compilation import compiled_together
from outrider.verify.model.gpu.decoder import is_plain
from outrider.verify.model.gpu.devices import Placement
from outrider.verify.model.gpu.text_work import INVARIANT_ROWS
from outrider.verify.model.load_options import LoadOptions
from outrider.verify.model.tensors import LAYER, Tensors
from outrider.verify.model.torch_runner import TorchRunner
from outrider.verify.model.transfer import on_device
from outrider.verify.start_times import timed

log = logging.getLogger("outrider.worker")
# The most layers of a sketch: they need memory while the load begins.
MOST_LAYERS = 8


class Unread(PackedFile):
    """A file whose weights have any values."""

    is_mapped = True

    def take(self, size: int, parts: Parts) -> NDArray[np.uint8]:
        return np.empty(size, np.uint8)


class Sketch:
    """A model with only the first layer of each kind."""

    def __init__(self, options: LoadOptions, config: Any, dtype: torch.dtype, source: Source | None, is_file: bool) -> None:
        """`source` has the weights that become blocks, if there are some; `is_file` as in `FileModel`.

        transformers changes PyTorch's default data type while it makes a model, so the thread that loads makes this one, too.
        Raises ValueError for a model that has no fused forward.
        """
        whole, short = read_config(config.to_dict()), deepcopy(config)
        if options.trust_remote_code or whole is None or not is_plain(whole):
            raise ValueError("the model has no fused forward")
        numbers = kinds(whole, source)[:MOST_LAYERS]
        short.num_hidden_layers = len(numbers)
        if types := getattr(config, "layer_types", None):
            short.layer_types = [types[number] for number in numbers]
        self._options, self._is_file, self._empty = options, is_file, empty_model(short, dtype)
        self._source = None if source is None else part_of(source, numbers)
        self._layers = len(whole.layers)  # a page has those of all layers, so kernels depend on their number

    def filled(self, device: torch.device) -> PreTrainedModel:
        """The model on its device, where weights have the forms that loading gives them, and any values."""
        model, options = deepcopy(self._empty), self._options
        if self._source is None:
            return cast(PreTrainedModel, model.to_empty(device=device))
        found = FileModel(model, self._source, self._is_file)
        tensors: Any = found.tensors
        tensors.numbers = lambda _, like, device: torch.empty_like(like, device=device)
        bits = all_bits(options.quantize, model) if options.quantize != "none" else {}
        found.fill(Placement(model, [device]), bits, keeps_blocks(options), Unread())
        return model

    def run(self, device: torch.device) -> None:
        """Runs its fused forward for all numbers of rows."""
        options = self._options
        with on_device(device):
            runner = TorchRunner(self.filled(device), options.context_tokens, started=False, kv_dtype=options.kv_dtype)
            runner.run_fused(INVARIANT_ROWS, self._layers)


def kinds(model: Architecture, source: Source | None) -> list[int]:
    """The first layer of each kind: of what it computes, and of the types of its tensors."""
    tensors = defaultdict[int, list[tuple[Any, ...]]](list)
    for name, each in {} if source is None else source.tensors.items():
        if (found := LAYER.match(name)) is not None:
            tensors[int(found[1])].append((name[found.end() :], each.type, each.scales is None))
    first = dict[Any, int]()
    for number, layer in enumerate(model.layers):
        first.setdefault((layer, frozenset(tensors[number])), number)
    return list(first.values())


def part_of(source: Source, numbers: Sequence[int]) -> Source:
    """The model with these layers alone."""
    tensors = {}
    for name, each in source.tensors.items():
        if (layer := LAYER.match(name)) is None:
            tensors[name] = each
        elif (number := int(layer[1])) in numbers:
            tensors[f"blk.{numbers.index(number)}.{name[layer.end() :]}"] = each
    layers = tuple(source.known.layers[number] for number in numbers)
    return source._replace(known=replace(source.known, layers=layers), tensors=Tensors(source.tensors.path, tensors))


@contextmanager
def compiled_beside(
    options: LoadOptions, location: Location, config: Any, dtype: torch.dtype, device: torch.device, by_file: bool
) -> Iterator[None]:
    """Compiles the kernels of a model that is loaded inside, in threads that end with the context.

    With `by_file`, `outrider.verify.model.file_model` reads it. A failure leaves the kernels to their first launch.
    """
    stopped, sketch = Event(), None

    def compile(sketch: Sketch) -> None:
        try:
            with timed("compiling kernels beside the load"), compiled_together(stopped):
                sketch.run(device)
                gc.collect()  # the load needs the memory
                torch.cuda.empty_cache()
        except Exception:
            log.debug("kernels are not compiled beside the load", exc_info=True)

    try:
        source = read(options, location) if by_file else None
        if by_file and source is None:
            raise ValueError("only transformers reads the model")
        sketch = Sketch(options, config, type_of(options, location, dtype), source, location.gguf is not None)
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
