"""A model's forward on a GPU as CUDA graphs: captured once per number of rows, replayed for any slot and any length of text.

A step of a small batch spends more time launching kernels than running them; a graph is launched whole. What changes from
step to step stands in the device's memory (`DeviceRows`), rows are padded to the next captured number.
Without `capture` the same forward runs launch by launch, on any device that Triton knows.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch._dynamo
from transformers import PreTrainedModel

from drafters.interface import MAX_NODES
from verify.model.attention import Attention
from verify.model.cache import CacheShape, KVCache
from verify.model.triton_attention import DeviceRows, KernelAttention

log = logging.getLogger("outrider.worker")
ROWS = (1, 2, 4, 8, 16, 32, 64, MAX_NODES + 1)  # the last committed token and a tree's nodes
WARM_UPS = 3
MOST_KINDS = 64  # of layers times numbers of rows that torch.compile takes for different

CompileError = torch._dynamo.exc.TorchDynamoException

# Tokens and positions [N], and the attention that the layers call, to logits [N, V].
Forward = Callable[[torch.Tensor, torch.Tensor, Attention], torch.Tensor]


class GraphedForward:
    """Forwards of up to MAX_NODES + 1 rows over slots of one shape and size."""

    def __init__(self, forward: Forward, shape: CacheShape, positions: int) -> None:
        self._forward = forward
        self._rows = DeviceRows(shape, ROWS[-1])
        self._attention = {count: KernelAttention(self._rows, count, positions) for count in ROWS}
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._logits: dict[int, torch.Tensor] = {}

    def __call__(
        self, cache: KVCache, tokens: torch.Tensor, depths: torch.Tensor, ancestors: torch.Tensor | None, known: int = 0
    ) -> torch.Tensor:
        """As `ModelRunner.forward`, all arguments on the host; the logits [N - known, V] are good until the next call.

        Runs the known rows once more: so few rows cost next to nothing here, another kind of graph would cost memory.
        """
        count = ROWS[bisect_left(ROWS, len(tokens))]
        with self._here():
            self._rows.set(cache, tokens, depths, ancestors)
            if count in self._graphs:
                self._graphs[count].replay()
                return self._logits[count][known : len(tokens)]
            return self._run(count)[known : len(tokens)]

    def _here(self) -> AbstractContextManager[None]:
        """Launches go to the model's device, which may be another than the thread's."""
        device = self._rows.shape.device
        return torch.cuda.device(device) if device.type == "cuda" else nullcontext()

    @torch.inference_mode()
    def _run(self, count: int) -> torch.Tensor:
        rows = self._rows
        return self._forward(rows.tokens[:count], rows.depths[:count] + rows.where[0], self._attention[count])

    def capture(self, cache: KVCache) -> None:
        """Captures all graphs, the largest first, so that the smaller ones fit into its memory. `cache` is any empty slot."""
        token = torch.zeros(1, dtype=torch.int64)
        with self._here():
            self._rows.set(cache, token, token, None)
            pool = torch.cuda.graph_pool_handle()
            side = torch.cuda.Stream()
            for count in reversed(ROWS):
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):  # kernels are compiled and workspaces allocated outside the graph
                    for _ in range(WARM_UPS):
                        self._run(count)
                torch.cuda.current_stream().wait_stream(side)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool, stream=side):
                    self._logits[count] = self._run(count)
                self._graphs[count] = graph
            torch.cuda.synchronize()
        log.info("captured %d graphs, of 1 to %d rows", len(ROWS), ROWS[-1])


@contextmanager
def compiled_layers(model: PreTrainedModel, backend: Any = "inductor") -> Iterator[None]:
    """While it lasts, the model's layers run as kernels that torch.compile makes: fewer, so that a captured step is shorter.

    Layer by layer, since a model's layers are all alike: what is made for one serves the others, and any number of rows.
    The first forward raises CompileError where that cannot be done.
    """
    names = model._no_split_modules or ()
    layers = [module for module in model.modules() if type(module).__name__ in names] or [model]
    for layer in layers:
        layer.forward = torch.compile(layer.forward, backend=backend)
    try:
        # A layer's number is not a reason to compile it anew.
        with torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True, recompile_limit=MOST_KINDS):
            yield
    finally:
        for layer in layers:
            del layer.forward
