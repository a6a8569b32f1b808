"""A model's forward as CUDA graphs: one per number of rows, replayed for any mix of streams and any text lengths.

With few rows, launching kernels takes longer than running them; a graph launches them all at once. The inputs of a step are
in device memory (`DeviceRows`); rows are padded to the next captured number. Without `capture`, kernels are launched one by
one, on any device that Triton supports.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol, cast

import torch
import torch._dynamo
from transformers import PreTrainedModel

from outrider.verify.errors import ModelError, first_sentence
from outrider.verify.model.attention import Attention
from outrider.verify.model.cache.paging import page_count
from outrider.verify.model.gpu.device_rows import DeviceRows, Piece, pieces_of
from outrider.verify.model.gpu.device_states import DeviceStates
from outrider.verify.model.gpu.devices import Crossings
from outrider.verify.model.gpu.paged_cache import PagedCache, PagePool
from outrider.verify.model.gpu.row_counts import ROWS, without_split_k
from outrider.verify.model.gpu.staged_graph import Capture, CudaCapture, StagedGraph
from outrider.verify.model.gpu.triton_attention import KernelAttention
from outrider.verify.model.gpu.triton_recurrence import KernelRecurrence, enter
from outrider.verify.model.hidden.tap import HiddenTap
from outrider.verify.model.recurrent.mixers import Mixer
from outrider.verify.model.recurrent.rows import Recurrence
from outrider.verify.model.row_class import RowClass
from outrider.verify.model.segment import Segment, keep_hidden
from outrider.verify.model.transfer import on_device

log = logging.getLogger("outrider.worker")
WARM_UP_RUNS = 3
RECOMPILE_LIMIT = 64  # variants of a layer (kind of layer, number of rows) that torch.compile may make

CompileError = torch._dynamo.exc.TorchDynamoException


class Forward(Protocol):
    """A model's forward."""

    def __call__(
        self, tokens: torch.Tensor, positions: torch.Tensor, attention: Attention, *, recurrence: Recurrence | None
    ) -> torch.Tensor:
        """Tokens and positions, int64 [N], to logits [N, V]."""


class GraphedForward:
    """Forwards over the caches of one pool. Implements `outrider.verify.model.segment.ForwardBackend`."""

    reads_prompts = is_invariant = False

    def __init__(
        self,
        forward: Forward,
        pool: PagePool,
        positions: int,
        rows: RowClass | None = None,
        tap: HiddenTap | None = None,
        crossings: Crossings | None = None,
    ) -> None:
        """`positions` is the longest cache's. With `rows`, forwards are padded to the numbers of rows in this class.

        With `tap`, the forward's hidden states are kept. `crossings` are those of the model, if it is captured.
        """
        self._forward, self._tap, self._crossings = forward, tap, crossings
        self._states: dict[int, torch.Tensor] = {}  # of the graphs' rows
        self._counts = [count for count in ROWS if rows is None or rows.low <= count <= rows.high]
        self.max_rows = self.max_streams = self._counts[-1]
        self._devices = [part.tensor.device for part in pool.parts]
        pages = page_count(positions, pool.page_tokens)
        self._rows = [DeviceRows(device, self.max_rows, pages) for device in self._devices]
        self._attention = KernelAttention(pool, self._rows, positions)
        recurrent = pool.shape.recurrent
        self._recurrent = None if recurrent is None else DeviceStates(recurrent, self.max_rows)
        self._has_class = rows is not None
        self._graphs: dict[int, StagedGraph] = {}
        self._logits: dict[int, torch.Tensor] = {}

    def __call__(self, segments: Sequence[Segment]) -> torch.Tensor:
        """The logits are valid until the next call. The caches have room for the rows.

        Known rows are computed again: they cost almost nothing here. If they do not fit, the segments take turns.
        """
        rows = sum(len(each.batch) for each in segments)
        if rows > self.max_rows:
            assert len(segments) > 1, "a segment must not have more rows than max_rows"
            half = len(segments) // 2
            return torch.cat([self(part).clone() for part in (segments[:half], segments[half:])])
        pieces = [piece for cache, batch, _ in segments for piece in pieces_of(cast(PagedCache, cache), batch)]
        count = self._counts[bisect_left(self._counts, rows)]
        with on_device(self._devices[0]):
            self._set(pieces)
            if self._recurrent is not None:
                enter(self._recurrent, segments)
            if count in self._graphs:
                self._graphs[count].replay()
                logits = self._logits[count]
            else:
                logits = self._run(count)
            if self._tap is not None:
                keep_hidden(self._states[count] if count in self._graphs else self._tap.states, segments, whole=True)
            return kept(logits, segments)

    def _set(self, pieces: Sequence[Piece]) -> None:
        """Uploads a forward's inputs to all devices."""
        packed = self._rows[0].packed(pieces)
        for rows in self._rows:
            rows.upload(packed)

    @torch.inference_mode()
    def _run(self, count: int) -> torch.Tensor:
        recurrence = None if self._recurrent is None else KernelRecurrence(self._recurrent)
        tokens, positions = (each[:count] for each in (self._rows[0].tokens, self._rows[0].positions))
        return self._forward(tokens, positions, self._attention, recurrence=recurrence)

    def capture(self) -> None:
        """Captures all graphs, the largest first so that the others reuse its memory."""
        with on_device(self._devices[0]), without_split_k() if self._has_class else nullcontext():
            self._set([])
            capture = CudaCapture(self._devices)
            for count in reversed(self._counts):
                with capture.aside():  # compile kernels and allocate workspaces outside the graph
                    for _ in range(WARM_UP_RUNS):
                        self._run(count)
                self.capture_rows(count, capture)
            for device in self._devices:
                torch.cuda.synchronize(device)
        log.info("captured %d CUDA graphs for %d to %d rows", len(self._counts), self._counts[0], self.max_rows)

    @torch.inference_mode()
    def capture_rows(self, count: int, capture: Capture) -> None:
        """Captures the forward of this number of rows."""
        assert self._crossings is not None
        graph = StagedGraph(capture)
        with graph.recorded(self._crossings):
            self._logits[count] = self._run(count)
            if self._tap is not None:
                self._states[count] = self._tap.states
        self._graphs[count] = graph

    def capture_model(self, model: PreTrainedModel, compile: str) -> None:
        """`capture` of this model's forward, compiled if that is possible. `compile` as in LoadOptions. Raises ModelError."""
        try:
            with nullcontext() if compile == "off" else compiled_layers(model):
                self.capture()
        except CompileError as error:
            if compile == "on":
                raise ModelError(
                    f"torch.compile failed for this model; set model.compile to auto or off: {first_sentence(error)}"
                ) from None
            log.warning("torch.compile failed for this model, so its steps are slower: %s", first_sentence(error))
            self.capture()


def kept(logits: torch.Tensor, segments: Sequence[Segment]) -> torch.Tensor:
    """The segments' kept rows among the logits of all rows; a view if they are the first ones."""
    parts, start, leading = [], 0, 0
    for each in segments:
        start += len(each.batch)
        parts.append(logits[start - each.kept : start])
        leading += each.kept
    return logits[:leading] if leading == start else torch.cat(parts)


@contextmanager
def compiled_layers(model: PreTrainedModel, backend: Any = "inductor") -> Iterator[None]:
    """Runs the model's layers through torch.compile inside the context; fused kernels make a captured step faster.

    Compiles layer by layer: the layers of a model are alike, so the code for one serves the others and any number of rows.
    Recurrent parts of layers, which count their calls, are left out. The first forward raises CompileError if the model cannot
    be compiled.
    """
    mixers = [module for module in model.modules() if isinstance(module.forward, Mixer)]
    forwards = [module.forward for module in mixers]
    names = model._no_split_modules or ()
    layers = [module for module in model.modules() if type(module).__name__ in names] or [model]
    for module, forward in zip(mixers, forwards, strict=True):
        module.forward = torch.compiler.disable(forward)
    for layer in layers:
        layer.forward = torch.compile(layer.forward, backend=backend)
    try:
        # Without this, torch.compile would specialise each layer on its index.
        with torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True, recompile_limit=RECOMPILE_LIMIT):
            yield
    finally:
        for layer in layers:
            del layer.forward
        for module, forward in zip(mixers, forwards, strict=True):
            module.forward = forward
