"""The target's hidden states, which draft heads read: where they are taken from, and where the last ones are kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.verify.model.memory import Device
from outrider.verify.model.transfer import lazy_zeros, to_device

if TYPE_CHECKING:
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

    def put(self, parts: Sequence[torch.Tensor]) -> None:
        """Keeps the parts, [N, hidden], of a forward that does not call the model's modules."""
        self._parts = {number: part[None] for number, part in enumerate(parts)}

    @property
    def states(self) -> torch.Tensor:
        """The states of the last forward's rows, [N, width]."""
        parts = [self._parts[number][0] for number in sorted(self._parts)]
        return torch.cat(self._bring(parts, self._device), -1)


class StateRing:
    """States by position: those from `first` to before `end`, at most `capacity` of them, the last ones."""

    def __init__(self, capacity: int, width: int, dtype: Any, device: Device) -> None:
        self.capacity = capacity
        self.first = self.end = 0
        kind = getattr(torch, str(dtype).removeprefix("torch."))
        self._rows = lazy_zeros((capacity, width), kind, torch.device(str(device)))
        self._moved: torch.cuda.Event | None = None  # a GPU has moved rows in another thread's stream

    def write(self, start: int, states: torch.Tensor | NDArray[np.float32]) -> None:
        """Replaces the states from position `start` on with `states`, [N, width]. A gap before them drops all others."""
        if not self.first <= start <= self.end:
            self.first = start
        self.end = start + len(states)
        self.first = max(self.first, self.end - self.capacity)
        states = torch.as_tensor(states)[-self.capacity :]
        place = (self.end - len(states)) % self.capacity
        before = self.capacity - place  # rows up to the end of the ring
        self._rows[place : place + len(states)] = states[:before]
        if len(states) > before:
            self._rows[: len(states) - before] = states[before:]

    def read(self, start: int, end: int) -> torch.Tensor:
        """The states of the positions from `start` to before `end`, [end - start, width]; zeros where there are none."""
        at = torch.arange(start, end)
        found = self.take(at)
        if start < self.first or end > self.end:
            found[to_device((at < self.first) | (at >= self.end), found.device)] = 0
        return found

    def take(self, positions: torch.Tensor) -> torch.Tensor:
        """The states of some positions, int64 [N], which are kept; [N, width]."""
        return self._rows[self._places(positions)]

    def _places(self, positions: torch.Tensor) -> torch.Tensor:
        return to_device(positions % self.capacity, self._rows.device)

    def commit(self, start: int, rows: Sequence[int]) -> None:
        """Moves the states at `start + r` for r in `rows` (ascending) to `start` on, and drops those behind them."""
        kept = torch.arange(start, start + len(rows))
        moved = torch.tensor(rows, dtype=torch.int64) + start
        if not torch.equal(kept, moved):
            self._rows[self._places(kept)] = self.take(moved)
            if self._rows.device.type == "cuda":
                self._moved = torch.cuda.Event()
                self._moved.record(torch.cuda.current_stream(self._rows.device))
        self.truncate(start + len(rows))

    def wait(self) -> None:
        """Lets this thread's stream wait until the rows of the last commit are in place; the host does not wait."""
        if self._moved is not None:
            torch.cuda.current_stream(self._rows.device).wait_event(self._moved)

    def truncate(self, length: int) -> None:
        self.end = min(self.end, length)
        self.first = min(self.first, self.end)

    def copy(self, source: StateRing | None, length: int) -> None:
        """Copies the states of `source` before position `length` over its own; None = no states."""
        self.first = self.end = 0
        if source is not None:
            self._rows.copy_(source._rows)
            self.first, self.end = source.first, source.end
            self.truncate(length)
