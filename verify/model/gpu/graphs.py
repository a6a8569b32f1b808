"""A model's forward as CUDA graphs: one per number of rows, replayed for any slot and any text length.

With few rows, launching kernels takes longer than running them; a graph launches them all at once. The inputs of a step are
in device memory (`DeviceRows`); rows are padded to the next captured number. Without `capture`, kernels are launched one by
one, on any device that Triton supports.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch._dynamo
from transformers import PreTrainedModel

from drafters.interface import MAX_NODES
from verify.model.attention import Attention
from verify.model.batch import ForwardBatch
from verify.model.cache import CacheShape, KVCache
from verify.model.gpu.device_rows import DeviceRows
from verify.model.gpu.triton_attention import KernelAttention
from verify.model.segment import Segment

log = logging.getLogger("outrider.worker")
ROWS = (1, 2, 4, 8, 16, 32, 64, MAX_NODES + 1)  # captured numbers of rows: the root and the draft's nodes
WARM_UP_RUNS = 3
RECOMPILE_LIMIT = 64  # variants of a layer (kind of layer, number of rows) that torch.compile may make

CompileError = torch._dynamo.exc.TorchDynamoException

# (tokens [N], positions [N], attention) -> logits [N, V]
Forward = Callable[[torch.Tensor, torch.Tensor, Attention], torch.Tensor]


class GraphedForward:
    """Forwards of up to MAX_NODES + 1 rows over slots of one shape and size.

    Implements `verify.model.runner.ForwardBackend`.
    """

    def __init__(self, forward: Forward, shape: CacheShape, positions: int) -> None:
        self._forward = forward
        self._rows = DeviceRows(shape, ROWS[-1])
        self._attention = {count: KernelAttention(self._rows, count, positions) for count in ROWS}
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._logits: dict[int, torch.Tensor] = {}

    max_streams = 1
    max_rows = MAX_NODES + 1

    def __call__(self, segments: Sequence[Segment]) -> torch.Tensor:
        """The logits are valid until the next call.

        Known rows are computed again: they cost almost nothing here, and graphs without them would take memory.
        """
        ((cache, batch, _),) = segments
        rows = len(batch)
        count = ROWS[bisect_left(ROWS, rows)]
        with self._on_device():
            self._rows.set(cache, batch)
            if count in self._graphs:
                self._graphs[count].replay()
                logits = self._logits[count]
            else:
                logits = self._run(count)
        return logits[batch.known : rows]

    def _on_device(self) -> AbstractContextManager[None]:
        """Launches kernels on the model's device, which may differ from the thread's current one."""
        device = self._rows.shape.device
        return torch.cuda.device(device) if device.type == "cuda" else nullcontext()

    @torch.inference_mode()
    def _run(self, count: int) -> torch.Tensor:
        rows = self._rows
        return self._forward(rows.tokens[:count], rows.depths[:count] + rows.location[0], self._attention[count])

    def capture(self, cache: KVCache) -> None:
        """Captures all graphs, the largest first so that the others reuse its memory. `cache` is any empty slot."""
        with self._on_device():
            self._rows.set(cache, ForwardBatch.chain(torch.zeros(1, dtype=torch.int64)))
            pool = torch.cuda.graph_pool_handle()
            side = torch.cuda.Stream()
            for count in reversed(ROWS):
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):  # compile kernels and allocate workspaces outside the graph
                    for _ in range(WARM_UP_RUNS):
                        self._run(count)
                torch.cuda.current_stream().wait_stream(side)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool, stream=side):
                    self._logits[count] = self._run(count)
                self._graphs[count] = graph
            torch.cuda.synchronize()
        log.info("captured %d CUDA graphs for 1 to %d rows", len(ROWS), ROWS[-1])


@contextmanager
def compiled_layers(model: PreTrainedModel, backend: Any = "inductor") -> Iterator[None]:
    """Runs the model's layers through torch.compile inside the context; fused kernels make a captured step faster.

    Compiles layer by layer: the layers of a model are alike, so the code for one serves the others and any number of rows.
    The first forward raises CompileError if the model cannot be compiled.
    """
    names = model._no_split_modules or ()
    layers = [module for module in model.modules() if type(module).__name__ in names] or [model]
    for layer in layers:
        layer.forward = torch.compile(layer.forward, backend=backend)
    try:
        # Without this, torch.compile would specialise each layer on its index.
        with torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True, recompile_limit=RECOMPILE_LIMIT):
            yield
    finally:
        for layer in layers:
            del layer.forward
