"""The rows of one stream in the recurrent layers of a forward: a draft tree or a chunk of a prompt over a slot's states.

Every row's output takes a few matrix products, without a state per row. A row j writes the vector u_j under the key k_j after
the state has decayed by exp(g_j). So the state after a row i is

    S_i = exp(c_i) S + sum over j on the path to i of (exp(c_i - c_j) k_j) u_j^T,    c = the sum of g along the path,

and a step keeps k, u and g of its rows instead of states. Decays are per head (D = 1) or per key channel (D = key_dim).
Layouts: keys [H, L, key_dim], values and u [H, L, value_dim], g [H, L, D], states [H, key_dim, value_dim].
A short causal convolution gathers each row's last ancestors, or the committed window before them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.verify.model.batch import ForwardBatch, Segment
from outrider.verify.model.recurrent.snapshot import DeviceSnapshot, SplitTensor
from outrider.verify.model.recurrent.states import ROWS, Chunk, RecurrentShape, RecurrentStates, Snapshot
from outrider.verify.model.transfer import lazy_zeros, to_device


def path_decays(g: torch.Tensor, ancestors: torch.Tensor) -> torch.Tensor:
    """The sum of g [H, L, D] along the path to each row, itself included; `ancestors` is [L, L], ones and zeros."""
    return torch.matmul(g.transpose(1, 2), ancestors.t()).transpose(1, 2)


def scan(
    queries: torch.Tensor,  # [H, N, key_dim], of the last N rows
    keys: torch.Tensor,  # [H, L, key_dim], of all rows
    values: torch.Tensor,  # [H, N, value_dim]
    beta: torch.Tensor | None,  # [H, N] for the gated delta rule; None = values are written as they are
    known: torch.Tensor,  # [H, L - N, value_dim]; u of the rows before
    g: torch.Tensor,  # [H, L, D]
    state: torch.Tensor,  # [H, key_dim, value_dim]
    ancestors: torch.Tensor,  # [L, L] of ones and zeros
    mask: torch.Tensor,  # [N, L]; 0 where a row has an ancestor or itself, else -inf
) -> tuple[torch.Tensor, torch.Tensor]:
    """u of the last N rows, and what they read of the states after them, q_i S_i; both [H, N, value_dim].

    For the gated delta rule (Yang et al., arXiv 2412.06464), a row removes what its key reads of the decayed state before it
    writes: u_i = beta_i (v_i - k_i (exp(g_i) S_parent)). Along the paths of a tree these are linear equations in u, with rows
    in an order in which parents precede children:

        (I + diag(beta) M) u = beta (v - (exp(c) k) S),    M_ij = k_i . (exp(c_i - c_j) k_j) where j is a proper ancestor of i.
    """
    count, first = queries.size(1), keys.size(1) - queries.size(1)
    # The queries and the keys of the rows read the state together, so it is loaded once.
    readers = queries if beta is None else torch.cat([queries, keys[:, first:]], 1)
    from_state, products = reads(readers, keys, path_decays(g, ancestors), state, mask)
    writes = values
    if beta is not None:
        writes = values - from_state[:, count:]
        if first > 0:
            writes.baddbmm_(products[:, count:, :first], known, alpha=-1.0)
        writes.mul_(beta.unsqueeze(-1))
        if count > 1:  # the diagonal and what is above it are not read; transposed, because the solver works by columns
            system = (products[:, count:, first:] * beta.unsqueeze(-1)).transpose(1, 2)
            solved = torch.linalg.solve_triangular(system, writes.transpose(1, 2), upper=True, left=False, unitriangular=True)
            writes = solved.transpose(1, 2)
    written = torch.cat([known, writes], 1) if first > 0 else writes
    return writes, torch.baddbmm(from_state[:, :count], products[:, :count], written)


def reads(
    readers: torch.Tensor,  # [H, R * N, key_dim]; vectors of the last N rows, one after the other, R times
    keys: torch.Tensor,  # [H, L, key_dim]
    decays: torch.Tensor,  # [H, L, D]; `path_decays`
    state: torch.Tensor,
    mask: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reads the decayed state, [H, R * N, value_dim], and each row's key, [H, R * N, L], for each vector."""
    heads, count, width = readers.size(0), mask.size(0), keys.size(2)
    own = decays[:, decays.size(1) - count :]
    if decays.size(2) == 1:
        weights = (own - decays.transpose(1, 2) + mask).exp().unsqueeze(1)
        from_state = torch.bmm(readers, state).view(heads, -1, count, state.size(2)).mul_(own.exp().unsqueeze(1))
        products = torch.bmm(readers, keys.transpose(1, 2)).view(heads, -1, count, keys.size(1)).mul_(weights)
    else:
        weights = (own.unsqueeze(2) - decays.unsqueeze(1) + mask.unsqueeze(-1)).exp() * keys.unsqueeze(1)
        rows = readers.view(heads, -1, count, width)
        from_state = torch.bmm((rows * own.exp().unsqueeze(1)).flatten(1, 2), state).unsqueeze(1)
        products = (rows.unsqueeze(3) * weights.unsqueeze(1)).sum(-1)
    return from_state.flatten(1, 2), products.flatten(1, 2)


def advance(state: torch.Tensor, keys: torch.Tensor, writes: torch.Tensor, g: torch.Tensor) -> None:
    """Replaces the state [H, key_dim, value_dim] by the one after a chain of rows."""
    decays = g.cumsum(1)
    last = decays[:, -1:]
    weighted = (keys * (last - decays).exp()).transpose(1, 2)
    state.mul_(last.exp().transpose(1, 2)).baddbmm_(weighted, writes)


def gather_index(ancestors: NDArray[np.bool_], first: int, window: int) -> NDArray[np.int64]:
    """Indices of the inputs of rows from `first` on, in the window followed by all rows, int64 [N, window + 1].

    `ancestors` is bool [L, L] with parents before children; the inputs are in the order of the text, the row's own last.
    """
    own, steps = ancestors[first:], np.arange(window, -1, -1)  # back from the row
    depths = own.sum(1, keepdims=True)
    members = own.nonzero()[1]  # row by row, and in a row by depth
    found = members[np.maximum(depths.cumsum(0) - 1 - steps, 0)]
    index: NDArray[np.int64] = np.where(steps < depths, found, depths - 1 - steps) + window
    return index


def convolve(
    inputs: torch.Tensor,  # [window + L, channels]
    index: torch.Tensor,  # `gather_index`
    taps: torch.Tensor,  # [window + 1, channels], contiguous; the weights
    bias: torch.Tensor | None,  # [channels]
) -> torch.Tensor:
    """The convolution's outputs, [N, channels], with the dtype of the weights."""
    inputs = inputs.to(taps.dtype)
    if inputs.size(0) > taps.size(0):  # a row alone reads all of them
        inputs = inputs.index_select(0, index.flatten())
    gathered = inputs.view(index.size(0), taps.size(0), taps.size(1))
    out = gathered[:, 0] * taps[0]
    for place in range(1, taps.size(0)):
        out.addcmul_(gathered[:, place], taps[place])
    return out if bias is None else out.add_(bias)


class TensorStates(RecurrentStates):
    """The states of one slot, on a CPU or on GPUs. Reads and writes of layers go through `RecurrentRows`."""

    def _zeros(self, size: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor | SplitTensor:
        if not self.shape.homes:
            return lazy_zeros(size, dtype or torch.float32, self.shape.device)
        layers = {part.device: max(part.convolutions, part.states) if size[0] else 0 for part in self.shape.parts}
        return SplitTensor([lazy_zeros((count, *size[1:]), dtype or torch.float32, home) for home, count in layers.items()])

    def _snapshot(self) -> Snapshot:
        window = self.inputs[:, : self.shape.window]
        return DeviceSnapshot.of(self.length, self.matrices, window, (self.matrices, window))

    def _places(self, rows: Sequence[int], offset: int) -> torch.Tensor:
        index = torch.tensor(rows) + offset
        return index if self.shape.homes else to_device(index, self.shape.device)

    def _taken(self, snapshot: Snapshot) -> Snapshot:
        if isinstance(snapshot, DeviceSnapshot):
            return snapshot
        return DeviceSnapshot.of(snapshot.length, snapshot.matrices, snapshot.windows, (self.matrices, self.inputs))

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
    """The rows of a layer with a matrix as its state; float32, as in `outrider.verify.model.recurrent.rows`."""

    queries: torch.Tensor  # [H, N, key_dim]
    keys: torch.Tensor  # [H, N, key_dim]
    values: torch.Tensor  # [H, N, value_dim]
    decays: torch.Tensor  # [H, N, D]
    beta: torch.Tensor | None  # [H, N] for the gated delta rule; None = values are written as they are

    def part(self, place: slice) -> Scan:
        beta = None if self.beta is None else self.beta[:, place]
        queries, keys, values, decays = (each[:, place] for each in self[:4])
        return Scan(queries, keys, values, decays, beta)


# A layer's own chunked form: the state [H, key_dim, value_dim] before a chunk to the outputs and the state after it.
Chunked = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
# The same, which also takes the rows of the chunk among those of a forward.
ChunkedRows = Callable[[slice, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class RecurrentRows:
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
        mask = batch.ancestor_mask()
        ancestors = torch.from_numpy(mask)
        hidden = torch.zeros(self.rows, len(batch)).masked_fill_(~ancestors[batch.known :], -torch.inf)
        index = torch.from_numpy(gather_index(mask, batch.known, states.shape.window))
        arrays = ancestors.float(), hidden, index  # as `scan` and `convolve` take them
        copies = ([each.to(part.device) for each in arrays] for part in states.shape.parts)
        self._tables = {tables[0].device: tables for tables in copies}

    def convolve(self, number: int, inputs: torch.Tensor, taps: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Inputs [N, channels] to outputs [N, channels]; `taps` is [window + 1, channels]."""
        window = self._states.shape.window
        if self._chunk is None:
            buffer = self._states.inputs[number, : window + self._end]
            buffer[window + self._known :] = inputs
            return convolve(buffer, self._tables[inputs.device][2], taps, bias)
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
        tables = self._tables[rows.keys.device][:2]
        found, outputs = scan(rows.queries, keys, rows.values, rows.beta, known, decays, state, *tables)
        writes[:, self._known :] = found
        return outputs


class Recurrence:
    """The recurrent layers of a forward over several streams, by their numbers."""

    def __init__(self, streams: Sequence[RecurrentRows]) -> None:
        self._streams = streams

    def _places(self) -> Iterator[tuple[RecurrentRows, slice]]:
        """Each stream's rows, and which rows of the forward they are."""
        start = 0
        for rows in self._streams:
            yield rows, slice(start, start + rows.rows)
            start += rows.rows

    def convolve(self, number: int, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """`RecurrentRows.convolve` for the rows of all streams, with the weights [channels, window + 1]."""
        taps = weight.t().float().contiguous()
        parts = [rows.convolve(number, inputs[place], taps, bias) for rows, place in self._places()]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def scan(self, number: int, rows: Scan, chunked: ChunkedRows) -> torch.Tensor:
        """`RecurrentRows.scan` for the rows of all streams."""
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
        self._numbers: list[int] = []  # of the layers that have called
        self._homes: dict[int, torch.device] = {}  # by layer

    def convolve(self, number: int, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        self.convolutions.append((weight.shape[1] - 1, len(weight)))
        self._numbers.append(number)
        self.dtype = inputs.dtype
        self._homes[number] = inputs.device
        return torch.zeros_like(inputs)

    def scan(self, number: int, rows: Scan, chunked: ChunkedRows) -> torch.Tensor:
        self._numbers.append(number)
        self._homes[number] = rows.keys.device
        heads, _, key_dim = rows.keys.shape
        self.scans.append((heads, key_dim, rows.values.shape[-1], rows.decays.shape[-1]))
        return torch.zeros_like(rows.values)

    def shape(self, device: torch.device) -> RecurrentShape:
        """The recorded shape of a model whose first device this is. Raises ValueError if the layers differ."""
        homes = tuple(self._homes[number] for number in sorted(self._homes))
        calls = [len(each) for each in (self.convolutions, self.scans) if each]
        are_alike = sorted(self._numbers) == sorted(number for count in calls for number in range(count)) and len({*calls}) == 1
        if len({*self.convolutions}) > 1 or len({*self.scans}) > 1 or not are_alike:
            raise ValueError("its recurrent layers differ in their shapes, which is not supported")
        window, channels = (self.convolutions or [(0, 0)])[0]
        heads, key_dim, value_dim, decay_dim = (self.scans or [(0, 0, 0, 0)])[0]
        scans = (len(self.scans), heads, key_dim, value_dim, decay_dim)
        elsewhere = homes if {*homes} - {device} else ()
        return RecurrentShape(len(self.convolutions), window, channels, *scans, self.dtype, device, elsewhere)


def recurrence_of(segments: Sequence[Segment]) -> Recurrence:
    states = [(each.cache.recurrent, each) for each in segments]
    return Recurrence([RecurrentRows(state, each.cache.length, each.batch) for state, each in states if state is not None])
