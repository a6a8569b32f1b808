"""The recurrent part of a slot: the state after the committed tokens, and the rows since, from which any path is committed.

A step's rows are kept as keys, writes and decays (`outrider.verify.model.recurrent.rows`) and as inputs of the convolutions.
They are folded into the state by the next forward, so what was committed can still be cut before it. A snapshot is kept every
SNAPSHOT_TOKENS, for rewinding further back: to the nearest one, from which the text is read again.

Rows have the positions of the slot's keys and values: row r of a forward after `length` tokens is at `length + r`. Imports no
torch: who computes the rows, brings the arrays.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from outrider.drafters.interface import MAX_NODES

# The rows of a step. Longer chunks of a prompt are read by the model's own chunked form.
ROWS = MAX_NODES + 1
SNAPSHOT_TOKENS = 256
# The limit of a session's snapshots on a device. Two are kept in any case.
SNAPSHOT_BYTES = 1 << 28


@dataclass(frozen=True)
class RecurrentShape:
    """A model's layers with a state: a convolution, a matrix, or both."""

    convolutions: int  # layers
    window: int  # inputs before a row that its convolution reads
    channels: int
    states: int  # layers
    heads: int
    key_dim: int
    value_dim: int
    decay_dim: int  # 1 = decays are per head; key_dim = per channel
    dtype: Any  # of the convolutions' inputs
    device: Any  # Device
    homes: tuple[Any, ...] = ()  # devices of the layers, if there are others; consecutive layers share one

    @property
    def parts(self) -> list[RecurrentShape]:
        """The layers on each device."""
        layers = Counter(self.homes or [self.device] * max(self.convolutions, self.states))
        counts = ((home, bool(self.convolutions) * count, bool(self.states) * count) for home, count in layers.items())
        return [replace(self, convolutions=some, states=others, device=home, homes=()) for home, some, others in counts]

    @property
    def snapshot_bytes(self) -> int:
        """The size of the state after one token."""
        windows = self.convolutions * self.window * self.channels * int(self.dtype.itemsize)
        return windows + 4 * self.states * self.heads * self.key_dim * self.value_dim

    @property
    def rows_bytes(self) -> int:
        """The size of a step's rows."""
        inputs = self.convolutions * self.channels * int(self.dtype.itemsize)
        return ROWS * (inputs + 4 * self.states * self.heads * (self.key_dim + self.value_dim + self.decay_dim))

    @property
    def snapshots(self) -> int:
        """The most snapshots that are kept of a text."""
        return max(2, SNAPSHOT_BYTES // max(part.snapshot_bytes for part in self.parts))

    @property
    def slot_bytes(self) -> int:
        """The largest size of a slot's recurrent part: the state, the one after a chunk, a step's rows, and snapshots."""
        return (2 + self.snapshots) * self.snapshot_bytes + self.rows_bytes


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The state after `length` tokens, which never changes."""

    length: int
    matrices: Any  # float32 [states, heads, key_dim, value_dim]
    windows: Any  # [convolutions, window, channels]

    @property
    def nbytes(self) -> int:
        return int(self.matrices.nbytes + self.windows.nbytes)

    def on_host(self, pinned: bool = False) -> Snapshot:
        """A copy in host memory, if it is not there; `pinned` as in `to_host`."""
        return self


@dataclass
class Chunk:
    """The state after a chunk that has not been committed yet, layer by layer."""

    length: int
    matrices: dict[int, Any]
    windows: dict[int, Any]


class RecurrentStates(ABC):
    """The states of one slot, in arrays or tensors."""

    def __init__(self, shape: RecurrentShape) -> None:
        per_head = (shape.states, shape.heads)
        self.shape = shape
        self.length = 0  # tokens before the state
        self.count = 0  # rows since
        self.matrices = self._zeros((*per_head, shape.key_dim, shape.value_dim))
        self.keys = self._zeros((*per_head, ROWS, shape.key_dim))
        self.writes = self._zeros((*per_head, ROWS, shape.value_dim))
        self.decays = self._zeros((*per_head, ROWS, shape.decay_dim))
        # The window before the state, then the rows.
        self.inputs = self._zeros((shape.convolutions, shape.window + ROWS, shape.channels), shape.dtype)
        self.chunk: Chunk | None = None
        self.snapshots: list[Snapshot] = []  # by length

    @abstractmethod
    def _zeros(self, size: tuple[int, ...], dtype: Any = None) -> Any:
        """Zeros of a data type, float32 unless it is given, which take memory when they are written to."""

    @abstractmethod
    def _snapshot(self) -> Snapshot:
        """A copy of the state."""

    @abstractmethod
    def _places(self, rows: Sequence[int], offset: int) -> Any:
        """The rows, each plus `offset`, as an index of the arrays."""

    def _taken(self, snapshot: Snapshot) -> Snapshot:
        """Another slot's snapshot where this slot's arrays are."""
        return snapshot

    @abstractmethod
    def _fold(self, rows: int, known: int) -> None:
        """Commits the first rows, which are a chain; keeps `known` of those that follow."""

    def settle(self, length: int, known: int = ROWS) -> None:
        """Moves the state to the end of the committed text, for a forward after it that reads at most `known` rows from it."""
        if rows := self.pending(length):
            self._fold(rows, known)
        self.keep_snapshot()

    def pending(self, length: int) -> int:
        """The rows to fold into the state, so that it is at the end of the committed text; adopts a chunk that ends there."""
        if self.chunk is not None and self.chunk.length == length:
            self._adopt(self.chunk)
        self.chunk = None
        assert self.length <= length <= self.length + self.count, "tokens were committed that no forward has read"
        return length - self.length

    def begin(self, length: int, rows: int) -> None:
        """Notes that the state was moved to the end of the committed text, and that `rows` rows after it are written."""
        self.length, self.count = length, rows
        self.keep_snapshot()

    def keep_snapshot(self) -> None:
        """Keeps a snapshot of the state if the last one is SNAPSHOT_TOKENS before it."""
        last = self.snapshots[-1].length if self.snapshots else 0
        if self.length - last >= SNAPSHOT_TOKENS:
            self.snapshots.append(self._snapshot())
            thin(self.snapshots, self.shape.snapshots)

    def _adopt(self, chunk: Chunk) -> None:
        for number, state in chunk.matrices.items():
            self.matrices[number] = state
        for number, window in chunk.windows.items():
            self.inputs[number, : self.shape.window] = window
        self.length, self.count = chunk.length, 0

    def commit(self, length: int, rows: Sequence[int]) -> None:
        """Moves the rows at `length + r` for r in `rows` (ascending) to `length` and on."""
        offset = length - self.length
        if self.chunk is not None or not self.count or list(rows) == list(range(len(rows))):
            return
        source = self._places(rows, offset)
        end = offset + len(rows)
        for array in (self.keys, self.writes, self.decays):
            array[:, :, offset:end] = array[:, :, source]
        window = self.shape.window
        self.inputs[:, window + offset : window + end] = self.inputs[:, window + source]

    def rewind(self, length: int) -> int:
        """Moves back to `length`, or to the nearest snapshot before it. Returns the tokens that need not be read again."""
        self.snapshots = [each for each in self.snapshots if each.length <= length]
        reached = self.length + self.count if self.chunk is None else self.chunk.length
        if self.length <= length <= reached and (self.chunk is None or length in (self.length, reached)):
            return length
        return self._load(self.snapshots[-1] if self.snapshots else None)

    def _load(self, snapshot: Snapshot | None) -> int:
        """Replaces the state; None is the beginning of a text."""
        if snapshot is None and not self.length and not self.count and self.chunk is None:
            return 0  # it is untouched, and takes no memory
        self.chunk, self.count = None, 0
        window = self.inputs[:, : self.shape.window]
        if snapshot is None:
            self.length = 0
            self.matrices[...] = 0
            window[...] = 0
        else:
            self.length = snapshot.length
            self.matrices[...] = snapshot.matrices
            window[...] = snapshot.windows
        return self.length

    def assume(self, length: int) -> None:
        """Takes the state after `length` tokens to be zero, for measurements."""
        self.snapshots.clear()
        self._load(None)
        self.length = length

    def states(self, length: int, end: int) -> list[Snapshot]:
        """The snapshots of the first `length` of `end` committed tokens, with one at the end if that is `length`."""
        before = [each for each in self.snapshots if each.length <= length]
        if length != end or not end or (before and before[-1].length == end):
            return before
        self.settle(end)
        return [*before, self._snapshot()]

    def restore(self, snapshots: Sequence[Snapshot], length: int) -> int:
        """Replaces the contents by the nearest of another slot's snapshots. Returns the tokens that need not be read again."""
        self.snapshots = [self._taken(each) for each in snapshots if each.length <= length]
        return self._load(self.snapshots[-1] if self.snapshots else None)


def thin(snapshots: list[Snapshot], limit: int) -> None:
    """Drops snapshots beyond the limit: far from the end, they are kept at larger distances. The last one is kept."""
    while len(snapshots) > limit:
        lengths = [0, *(each.length for each in snapshots)]
        end = lengths[-1]
        gaps = {
            place: (lengths[place + 2] - lengths[place]) / (end - lengths[place + 1] + SNAPSHOT_TOKENS)
            for place in range(len(snapshots) - 1)
        }
        del snapshots[min(gaps, key=gaps.__getitem__)]
