"""A model over several devices: which layers are on which, and how a forward's tensors get there.

Consecutive decoder layers share a device. Everything else is on the first one: tokens enter and logits leave there, and a head
that shares the embedding table finds it there. Knows nothing about caches.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten  # private, and tested with PyTorch 2.13
from transformers import PreTrainedModel

from outrider.verify.errors import ModelError
from outrider.verify.model.gpu.split_linear import SplitLinear

if TYPE_CHECKING:
    from outrider.verify.model.gpu.graphs import StagedGraph


class Placement:
    """The device of every module of a model."""

    def __init__(self, model: PreTrainedModel, devices: Sequence[torch.device]) -> None:
        """Raises ModelError if there are fewer layers than devices."""
        self.devices = tuple(devices)
        self._model = model
        homes: dict[torch.nn.Module, torch.device] = {}
        if len(devices) > 1:
            layers = decoder_layers(model)
            if len(layers) < len(devices):
                raise ModelError(
                    f"The model has {len(layers)} layers, but model.device names {len(devices)} devices; name as many at most."
                )
            for layer, number in zip(layers, split(_sizes(model, layers), len(devices)), strict=True):
                homes |= dict.fromkeys(layer.modules(), devices[number])
        self.modules: dict[torch.device, list[torch.nn.Module]] = {device: [] for device in devices}
        for module in model.modules():
            self.modules[homes.get(module, devices[0])].append(module)

    def move(self) -> None:
        """Moves the weights to their devices."""
        if len(self.devices) == 1:
            self._model.to(self.devices[0])
            return
        for device, modules in self.modules.items():
            for module in modules:
                module._apply(partial(torch.Tensor.to, device=device), recurse=False)


def decoder_layers(model: PreTrainedModel) -> torch.nn.ModuleList:
    """The model's decoder layers in their order. Raises ModelError if they are not found."""
    count = model.config.get_text_config().num_hidden_layers
    lists = (module for module in model.modules() if isinstance(module, torch.nn.ModuleList) and len(module) == count)
    found = next(lists, None)
    if found is None:
        raise ModelError("The layers of this model cannot be spread over devices; name one in model.device.")
    return found


def split(sizes: Sequence[int], parts: int) -> list[int]:
    """The part of each layer, ascending from 0: parts of about the same size, none of them without a layer.

    `sizes` are those of what the first part has beside its layers, and of the layers.
    """
    layers, total = len(sizes) - 1, sum(sizes)
    found = [0]
    for layer, (size, end) in enumerate(list(zip(sizes, accumulate(sizes), strict=True))[2:], start=1):
        wanted = int(parts * (end - size / 2) / total)
        least = max(found[-1], parts - (layers - layer))
        found.append(min(max(wanted, least), found[-1] + 1))
    return found


def _sizes(model: PreTrainedModel, layers: Iterable[torch.nn.Module]) -> list[int]:
    """Bytes of what is not in the layers, and of each layer."""
    sizes = [sum(tensor.nbytes for tensor in layer.parameters()) for layer in layers]
    return [sum(tensor.nbytes for tensor in model.parameters()) - sum(sizes), *sizes]


class Crossings:
    """Gives every decoder layer its inputs on its own device, by hooks, and returns the last one's output to the first device.

    What a forward hands to several layers, such as rotary embeddings, is copied to each device once.
    """

    def __init__(self, model: torch.nn.Module, first: torch.device) -> None:
        """Takes the other devices from the model's weights; without any, and if layers are split, there is nothing to do."""
        self.first = first
        self.recorder: StagedGraph | None = None  # records the copies, to repeat them
        self._copies: dict[tuple[int, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}  # of this forward
        is_split = any(isinstance(each, SplitLinear) for each in model.modules())
        if is_split or len({tensor.device for tensor in model.parameters()}) == 1:
            return
        layers = decoder_layers(cast(PreTrainedModel, model))
        for layer in layers:
            layer.register_forward_pre_hook(partial(self._enter, next(layer.parameters()).device), with_kwargs=True)
        layers[-1].register_forward_hook(self._leave)
        model.register_forward_pre_hook(self._forget)

    def _enter(self, device: torch.device, _: torch.nn.Module, inputs: Any, others: Any) -> Any:
        return self.bring((inputs, others), device)

    def _leave(self, _: torch.nn.Module, inputs: Any, output: Any) -> Any:
        return self.bring(output, self.first)

    def _forget(self, *_: Any) -> None:
        self._copies.clear()

    def bring(self, value: Any, device: torch.device) -> Any:
        leaves, form = tree_flatten(value)
        away = {id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.device != device}
        if not away:
            return value
        new = [leaf for leaf in away.values() if (id(leaf), device) not in self._copies]
        copies = [leaf.to(device) for leaf in new] if self.recorder is None or not new else self.recorder.copy(new, device)
        self._copies |= {(id(leaf), device): (leaf, copy) for leaf, copy in zip(new, copies, strict=True)}
        return tree_unflatten([self._copies[id(leaf), device][1] if id(leaf) in away else leaf for leaf in leaves], form)
