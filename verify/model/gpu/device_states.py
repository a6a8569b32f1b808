"""The places of streams' recurrent states, and the descent of a forward's rows, in device memory.

The states of a stream are tensors of its own (`outrider.verify.model.recurrent.states`), which never move: a captured graph
reads their addresses. Knows nothing about layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.verify.model.recurrent.rows import TensorStates
from outrider.verify.model.recurrent.state import gather_index
from outrider.verify.model.recurrent.states import ROWS, RecurrentShape
from outrider.verify.model.segment import Segment
from outrider.verify.model.transfer import to_device

WORD_BITS = 64
# The words of a row's path.
WORDS = -(-ROWS // WORD_BITS)
STREAM_FIELDS = 8
# The stream of a row that pads a forward.
NO_STREAM = -1


class DeviceStates:
    """The streams of a forward in recurrent layers.

    Kernels read `rows`, int64 [1 + WORDS + window + 1, max_rows]: stream, path (`path_words`), and the places that a
    convolution reads (`gather_index`); `streams`, int64 [STREAM_FIELDS, max_rows]: first row, number of rows, rows to fold into
    the state, and addresses of matrices, keys, writes, decays and inputs. A row that pads the forward has the stream NO_STREAM.
    """

    def __init__(self, shape: RecurrentShape, max_rows: int) -> None:
        self.shape = shape
        row_fields = 1 + WORDS + shape.window + 1
        self._packed = torch.zeros(row_fields + STREAM_FIELDS, max_rows, dtype=torch.int64, device=shape.device)
        self.rows, self.streams = self._packed[:row_fields], self._packed[row_fields:]
        self.set([])

    def set(self, segments: Sequence[Segment]) -> list[int]:
        """Uploads a forward's streams; returns the number of rows to fold into the state of each. Adopts chunks."""
        packed = torch.zeros(self._packed.shape, dtype=torch.int64)
        rows, streams = packed[: len(self.rows)], packed[len(self.rows) :]
        rows[0] = NO_STREAM
        pending, start = [], 0
        for index, (cache, batch, *_) in enumerate(segments):
            states, ancestors = states_of(cache.recurrent), torch.from_numpy(batch.ancestor_mask())
            pending.append(states.pending(cache.length))
            end = start + len(batch)
            rows[0, start:end] = index
            rows[1 : 1 + WORDS, start:end] = path_words(ancestors)
            rows[1 + WORDS :, start:end] = gather_index(ancestors, 0, self.shape.window).t()
            buffers = (states.matrices, states.keys, states.writes, states.decays, states.inputs)
            streams[:, index] = torch.tensor([start, len(batch), pending[-1], *(each.data_ptr() for each in buffers)])
            start = end
        self._packed.copy_(to_device(packed, self.shape.device))
        return pending


def states_of(states: TensorStates | None) -> TensorStates:
    """The states of a cache of a model that has some."""
    assert states is not None
    return states


def path_words(ancestors: torch.Tensor) -> torch.Tensor:
    """bool [N, N] to int64 [WORDS, N]: bit j of word w says that the row descends from row 64 w + j, or is it."""
    padded = torch.nn.functional.pad(ancestors, (0, WORDS * WORD_BITS - len(ancestors)))
    powers = torch.ones(1, dtype=torch.int64) << torch.arange(WORD_BITS)
    return (padded.view(-1, WORDS, WORD_BITS) * powers).sum(-1).t()
