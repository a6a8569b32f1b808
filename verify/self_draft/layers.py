"""A model without some of its decoder layers. It has the weights, the cache and the layers' numbers of the whole model."""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any, TypeVar, cast

import torch
from transformers import PreTrainedModel

from outrider.verify.errors import ModelError, first_sentence
from outrider.verify.model.batch import ForwardBatch
from outrider.verify.model.runner import ModelRunner

SELF = "self"  # as draft_model.path: the target itself
ANOTHER = "set draft_model.path to a draft model"

Module = TypeVar("Module", bound=torch.nn.Module)


class Skipped(torch.nn.Module):
    """Stands for a decoder layer: returns its input. Has the layer's plain attributes, which some models read."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.__dict__.update({name: value for name, value in vars(layer).items() if isinstance(value, str | int)})

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return hidden_states


class LayerSkipper:
    """Makes runners of a started target that skip layers. Raises ModelError for targets that cannot skip any."""

    def __init__(self, target: ModelRunner) -> None:
        self._target = target
        if target.cache_shape.recurrent is not None:
            raise ModelError(
                f"The target has recurrent layers, whose states cannot be shared with drafts that skip layers; {ANOTHER}."
            )
        decoder = cast(Any, target.model.get_decoder())
        if not isinstance(getattr(decoder, "layers", None), torch.nn.ModuleList) or len(decoder.layers) < 2:
            raise ModelError(f"The target has no list of several decoder layers to skip; {ANOTHER}.")
        self.layers = len(decoder.layers)

    def without(self, skipped: Collection[int]) -> ModelRunner:
        """A runner that is not started, over caches of the target; `skipped` are numbers of layers. Raises ModelError."""
        if not all(0 <= layer < self.layers for layer in skipped) or len(set(skipped)) >= self.layers:
            raise ModelError(
                f"The target has the layers 0 to {self.layers - 1}, of which one must remain; change draft_model.skip_layers."
            )
        runner = copy.copy(self._target)
        runner.model = self._model(frozenset(skipped))
        runner.compute_in(None)
        try:
            runner.forward(runner.new_cache(), ForwardBatch.chain(torch.zeros(1, dtype=torch.int64)))
        except Exception as error:  # whatever a model of any architecture raises
            raise ModelError(
                f"The target's forward fails without the layers {sorted(skipped)} ({type(error).__name__}: "
                f"{first_sentence(error)}); change draft_model.skip_layers, or {ANOTHER}."
            ) from None
        return runner

    def _model(self, skipped: Collection[int]) -> PreTrainedModel:
        model, decoder = self._target.model, self._target.model.get_decoder()
        path = next(name for name, module in model.named_modules() if module is decoder)
        found = copied = shallow_copy(model)
        for name in path.split(".") if path else ():
            child = shallow_copy(copied.get_submodule(name))
            copied.register_module(name, child)
            copied = cast(Any, child)
        layers = [
            Skipped(layer) if number in skipped else layer
            for number, layer in enumerate(cast(torch.nn.ModuleList, copied.layers))
        ]
        copied.layers = torch.nn.ModuleList(layers)
        return found


def shallow_copy(module: Module) -> Module:
    """A module whose children can be replaced without changing the original; the children are the same objects."""
    found = copy.copy(module)
    found._modules = dict(module._modules)
    return found
