"""The states of recurrent layers as the library keeps them. Their rows are folded into them by the library, row by row.

So a state has the same bits however the rows before it were computed: one by one, in a draft tree, or in a chunk of a prompt.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.verify.model.architecture.description import Layer, State
from outrider.verify.model.batch import ForwardBatch
from outrider.verify.model.cpu.native.decoder import Decoder
from outrider.verify.model.cpu.native.library import Engine
from outrider.verify.model.cpu.native.structures import Slot
from outrider.verify.model.memory import FLOAT32, HOST, zeros
from outrider.verify.model.recurrent.states import ROWS, Chunk, RecurrentShape, RecurrentStates, Snapshot


def shape_of(layers: Sequence[Layer], hidden: int) -> RecurrentShape | None:
    found = [each.recurrence for each in layers if each.recurrence is not None]
    if not found:
        return None
    one, count = found[0], len(found)
    if one.kind is State.CONVOLUTION:
        return RecurrentShape(count, one.window, hidden, 0, 0, 0, 0, 0, FLOAT32, HOST)
    channels = 2 * one.key_heads * one.key_dim + one.heads * one.value_dim
    sizes = (count, one.heads, one.key_dim, one.value_dim, one.decay_dim)
    return RecurrentShape(count, one.window, channels, *sizes, FLOAT32, HOST)


class NativeStates(RecurrentStates):
    """The states of one slot. `decays` are factors here, not logarithms."""

    def __init__(self, shape: RecurrentShape, decoder: Decoder, engine: Engine) -> None:
        super().__init__(shape)
        self._decoder, self._engine = decoder, engine

    def describe(self, length: int, batch: ForwardBatch) -> tuple[Slot, NDArray[np.int32]]:
        """The slot for a forward after `length` committed tokens, and the array that it refers to. Call `written` after it."""
        folded, parents = self.pending(length), parents_of(batch)
        slot = self._slot(folded, batch.known)
        slot.parents = parents.ctypes.data
        if batch.ancestors is None and len(batch) > ROWS:
            assert not batch.known
            shape = self.shape
            matrices = np.empty_like(self.matrices)
            windows = np.empty((shape.convolutions, shape.window, shape.channels), np.float32)
            self.chunk = Chunk(length + len(batch), dict(enumerate(matrices)), dict(enumerate(windows)))
            slot.next_matrices, slot.next_inputs = matrices.ctypes.data, windows.ctypes.data
        else:
            assert batch.known <= self.count - folded or not batch.known, "known rows were not computed by a forward"
        return slot, parents

    def written(self, length: int, batch: ForwardBatch) -> None:
        """Notes that a forward has folded rows and written new ones."""
        self.begin(length, 0 if self.chunk is not None else len(batch))

    def _slot(self, folded: int, known: int) -> Slot:
        arrays = {name: getattr(self, name).ctypes.data for name in ("matrices", "keys", "writes", "decays", "inputs")}
        return Slot(**arrays, capacity=ROWS, folded=folded, known=known)

    def _zeros(self, size: tuple[int, ...], dtype: Any = None) -> NDArray[np.float32]:
        return zeros(size, np.float32)

    def _snapshot(self) -> Snapshot:
        return Snapshot(self.length, self.matrices.copy(), self.inputs[:, : self.shape.window].copy())

    def _places(self, rows: Sequence[int], offset: int) -> NDArray[np.int64]:
        return np.array(rows) + offset

    def _fold(self, rows: int, known: int) -> None:
        left = min(known, self.count - rows)
        self._engine.call("outrider_fold", ctypes.byref(self._decoder.description), ctypes.byref(self._slot(rows, left)))
        self.length, self.count = self.length + rows, left


def parents_of(batch: ForwardBatch) -> NDArray[np.int32]:
    """The row before each row in its text, [N]; -1 for the committed tokens."""
    rows = np.arange(len(batch), dtype=np.int32)
    if batch.ancestors is None:
        return rows - 1
    proper = batch.ancestors & (rows[:, None] > rows)
    found: NDArray[np.int32] = np.where(proper, rows, -1).max(1).astype(np.int32)
    return found
