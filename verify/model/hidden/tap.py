"""Takes the hidden states of the target's forwards for a draft head, by hooks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel


class HiddenTap:
    """The states of the rows of a model's last forward."""

    def __init__(
        self, model: PreTrainedModel, layers: Sequence[int], bring: Callable[[Any, torch.device], Any] = lambda value, _: value
    ) -> None:
        """Takes the inputs of these decoder layers, side by side; without any, the last hidden state, normalised.

        `bring` moves tensors to a device: the states are on the model's.
        """
        self.layers = tuple(layers)
        self._bring = bring
        self._device = model.device
        self.width = int(model.config.get_text_config().hidden_size) * max(1, len(layers))
        self._parts: dict[int, torch.Tensor] = {}
        decoder = model.get_decoder()
        for number, index in enumerate(layers):
            decoder.layers[index].register_forward_pre_hook(partial(self._take_input, number), with_kwargs=True)
        if not layers:
            decoder.register_forward_hook(self._take_output)

    def _take_input(self, number: int, _: torch.nn.Module, inputs: tuple[Any, ...], others: dict[str, Any]) -> None:
        self._parts[number] = inputs[0] if inputs else others["hidden_states"]

    def _take_output(self, _: torch.nn.Module, inputs: Any, output: Any) -> None:
        self._parts[0] = output[0]

    @property
    def states(self) -> torch.Tensor:
        """The states of the last forward's rows, [N, width]."""
        parts = [self._parts[number][0] for number in sorted(self._parts)]
        return torch.cat(self._bring(parts, self._device), -1)
