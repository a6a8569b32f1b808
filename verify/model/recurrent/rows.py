"""The rows of one stream in the recurrent layers of a forward: a draft tree or a chunk of a prompt over a slot's states."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from outrider.verify.model.batch import ForwardBatch
from outrider.verify.model.recurrent.state import advance, convolve, gather_index, scan
from outrider.verify.model.recurrent.states import ROWS, Chunk, RecurrentShape, RecurrentStates, Snapshot
from outrider.verify.model.segment import Segment
from outrider.verify.model.transfer import lazy_zeros, to_device


class TensorStates(RecurrentStates):
    """The states of one slot, on a CPU or a GPU. Reads and writes of layers go through `RecurrentRows`."""

    def _zeros(self, size: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        return lazy_zeros(size, dtype or torch.float32, self.shape.device)

    def _copied(self, values: torch.Tensor) -> torch.Tensor:
        return values.clone()

    def _places(self, rows: Sequence[int], offset: int) -> torch.Tensor:
        return to_device(torch.tensor(rows) + offset, self.matrices.device)

    def _taken(self, snapshot: Snapshot) -> Snapshot:
        parts = (torch.as_tensor(each, device=self.matrices.device) for each in (snapshot.matrices, snapshot.windows))
        return Snapshot(snapshot.length, *parts)

    def _fold(self, rows: int, known: int) -> None:
        window, left = self.shape.window, min(known, self.count - rows)
        for matrices, keys, writes, decays in zip(self.matrices, self.keys, self.writes, self.decays, strict=True):
            advance(matrices, keys[:, :rows], writes[:, :rows], decays[:, :rows])
        if left:
            for tensor in (self.keys, self.writes, self.decays):
                tensor[:, :, :left] = tensor[:, :, rows : rows + left].clone()
        self.inputs[:, : window + left] = self.inputs[:, rows : rows + window + left].clone()
        self.length, self.count = self.length + rows, left


class Scan(NamedTuple):
    """The rows of a layer with a matrix as its state; float32, as in `outrider.verify.model.recurrent.state`."""

    queries: torch.Tensor  # [H, N, key_dim]
    keys: torch.Tensor  # [H, N, key_dim]
    values: torch.Tensor  # [H, N, value_dim]
    decays: torch.Tensor  # [H, N, D]
    beta: torch.Tensor | None  # [H, N] for the gated delta rule; None = values are written as they are

    def part(self, place: slice) -> Scan:
        """Some of the rows."""
        beta = None if self.beta is None else self.beta[:, place]
        queries, keys, values, decays = (each[:, place] for each in self[:4])
        return Scan(queries, keys, values, decays, beta)


# A layer's own chunked form: the state [H, key_dim, value_dim] before a chunk to the outputs and the state after it.
Chunked = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class RecurrentRows:
    """The rows of one stream. Layers are numbered in the order of their calls."""

    def __init__(self, states: TensorStates, length: int, batch: ForwardBatch) -> None:
        """After `length` committed tokens; takes the batch's rows from `known` on."""
        states.settle(length, batch.known)
        self._states = states
        self.rows = len(batch) - batch.known
        self._chunk = Chunk(length + len(batch), {}, {}) if batch.ancestors is None and len(batch) > ROWS else None
        if self._chunk is not None:
            assert not batch.known
            states.chunk, states.count = self._chunk, 0
            return
        assert batch.known <= states.count, "known rows were not computed by a forward"
        states.count = len(batch)
        self._known, self._end = batch.known, len(batch)
        ancestors, device = torch.from_numpy(batch.ancestor_mask()), states.shape.device
        mask = torch.zeros(self.rows, len(batch)).masked_fill_(~ancestors[batch.known :], -torch.inf)
        self._ancestors, self._mask = ancestors.float().to(device), mask.to(device)  # as `scan` takes them
        self._index = gather_index(ancestors, batch.known, states.shape.window).to(device)

    def convolve(self, number: int, inputs: torch.Tensor, taps: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Inputs [N, channels] to outputs [N, channels]; `taps` is [window + 1, channels]."""
        window = self._states.shape.window
        if self._chunk is None:
            buffer = self._states.inputs[number, : window + self._end]
            buffer[window + self._known :] = inputs
            return convolve(buffer, self._index, taps, bias)
        joined = torch.cat([self._states.inputs[number, :window], inputs])
        self._chunk.windows[number] = joined[-window:].clone()
        steps = torch.arange(window + 1, device=inputs.device)
        index = torch.arange(len(inputs), device=inputs.device)[:, None] + steps
        return convolve(joined, index, taps, bias)

    def scan(self, number: int, rows: Scan, chunked: Chunked) -> torch.Tensor:
        """Reads the state for the rows, [H, N, value_dim]."""
        states = self._states
        if self._chunk is not None:
            outputs, self._chunk.matrices[number] = chunked(states.matrices[number])
            return outputs.transpose(0, 1)
        keys, writes, decays = (each[number, :, : self._end] for each in (states.keys, states.writes, states.decays))
        keys[:, self._known :], decays[:, self._known :] = rows.keys, rows.decays
        known, state = writes[:, : self._known], states.matrices[number]
        found, outputs = scan(rows.queries, keys, rows.values, rows.beta, known, decays, state, self._ancestors, self._mask)
        writes[:, self._known :] = found
        return outputs


class StreamRows(NamedTuple):
    """A stream's rows, and which rows of the forward they are."""

    rows: RecurrentRows
    place: slice


class Recurrence:
    """The recurrent layers of a forward over several streams, called in the order of the layers."""

    def __init__(self, streams: Sequence[RecurrentRows]) -> None:
        self._streams = streams
        self._convolutions = self._scans = 0  # calls so far

    def _places(self) -> Iterator[StreamRows]:
        start = 0
        for rows in self._streams:
            yield StreamRows(rows, slice(start, start + rows.rows))
            start += rows.rows

    def convolve(self, inputs: torch.Tensor, taps: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """`RecurrentRows.convolve` for the rows of all streams."""
        number, self._convolutions = self._convolutions, self._convolutions + 1
        parts = [rows.convolve(number, inputs[place], taps, bias) for rows, place in self._places()]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def scan(self, rows: Scan, chunked: Callable[[slice, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """`RecurrentRows.scan` for the rows of all streams; `chunked` also takes the rows of a chunk."""
        number, self._scans = self._scans, self._scans + 1
        parts = []
        for stream, place in self._places():
            own = rows if len(self._streams) == 1 else rows.part(place)
            parts.append(stream.scan(number, own, lambda state, place=place: chunked(place, state)))  # type: ignore[misc]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


class StateProbe(Recurrence):
    """Records the shapes of a model's recurrent layers in a forward of one row, to size their states."""

    def __init__(self) -> None:
        super().__init__([])
        self.convolutions: list[tuple[int, int]] = []  # window and channels
        self.scans: list[tuple[int, int, int, int]] = []  # heads, key_dim, value_dim, decay_dim
        self.dtype = torch.float32  # of the convolutions' inputs
        self._devices: set[torch.device] = set()

    def convolve(self, inputs: torch.Tensor, taps: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        self.convolutions.append((len(taps) - 1, taps.shape[1]))
        self.dtype = inputs.dtype
        self._devices.add(inputs.device)
        return torch.zeros_like(inputs)

    def scan(self, rows: Scan, chunked: Callable[[slice, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        self._devices.add(rows.keys.device)
        heads, _, key_dim = rows.keys.shape
        self.scans.append((heads, key_dim, rows.values.shape[-1], rows.decays.shape[-1]))
        return torch.zeros_like(rows.values)

    def shape(self, device: torch.device) -> RecurrentShape:
        """The recorded shape. Raises ValueError if the layers differ, or are not on the device."""
        if self._devices - {device}:
            raise ValueError("its recurrent layers must be on one device; name one in model.device")
        if len(set(self.convolutions)) > 1 or len(set(self.scans)) > 1:
            raise ValueError("its recurrent layers differ in their shapes, which is not supported")
        window, channels = (self.convolutions or [(0, 0)])[0]
        heads, key_dim, value_dim, decay_dim = (self.scans or [(0, 0, 0, 0)])[0]
        scans = (len(self.scans), heads, key_dim, value_dim, decay_dim)
        return RecurrentShape(len(self.convolutions), window, channels, *scans, self.dtype, device)


def recurrence_of(segments: Sequence[Segment]) -> Recurrence:
    """The rows of the segments in recurrent layers."""
    states = [(each.cache.recurrent, each) for each in segments]
    return Recurrence([RecurrentRows(state, each.cache.length, each.batch) for state, each in states if state is not None])
