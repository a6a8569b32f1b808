"""A model's forward as CUDA graphs: one per number of rows, replayed for any mix of streams and any text lengths.

With few rows, launching kernels takes longer than running them; a graph launches them all at once. The inputs of a step are
in device memory (`DeviceRows`); rows are padded to the next captured number. Without `capture`, or if it fails, kernels are
launched one by one, on any device that Triton supports. Over several devices, each stretch on one device is a graph of its own.

Two functions of `torch._C` are private; `torch.cuda.use_mem_pool` ends with them in PyTorch 2.11 to 2.13.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from transformers import PreTrainedModel
from triton.runtime.errors import OutOfResources

from outrider.verify.errors import ModelError, first_sentence
from outrider.verify.model.batch import Segment, keep_hidden
from outrider.verify.model.cache.kv_cache import page_count
from outrider.verify.model.gpu.compilation import CompileError, compiled_layers, compiled_together
from outrider.verify.model.gpu.device_rows import DeviceRows, Piece, pieces_of, states_of
from outrider.verify.model.gpu.devices import Crossings
from outrider.verify.model.gpu.experts import KernelExperts, TouchedExperts
from outrider.verify.model.gpu.paged_cache import PagedCache, PagePool
from outrider.verify.model.gpu.text_work import ROWS, TextWork
from outrider.verify.model.gpu.tiles import replayed_seconds, tuning_of
from outrider.verify.model.gpu.triton_attention import KernelAttention
from outrider.verify.model.gpu.triton_products import counters_of
from outrider.verify.model.gpu.triton_recurrence import KernelRecurrence, enter
from outrider.verify.model.transfer import on_device
from outrider.verify.start_times import timed

log = logging.getLogger("outrider.worker")
# The major compute capabilities for which PyTorch has kernels of grouped products.
GROUPED_CAPABILITIES = (9, 10)


# A model's forward: tokens and positions, int64 [N], a `KernelAttention`, and `recurrence` by name, to logits [N, V].
Forward: TypeAlias = Callable[..., torch.Tensor]
# Captures what is launched on a device inside the context, and gives the function that repeats it.
Capture = Callable[[torch.device], AbstractContextManager[Callable[[], Any]]]


class GraphedForward:
    """Forwards over the caches of one pool, several streams at once."""

    def __init__(
        self,
        forward: Forward,
        pool: PagePool,
        positions: int,
        groups: int,
        counts: Sequence[int] = ROWS,
        tap: Any = None,
        crossings: Crossings | None = None,
    ) -> None:
        """`positions` is the longest cache's; `groups` are the most query heads per key head of any layer.

        Forwards are padded to one of the numbers of rows `counts`, ascending. The `states` that `tap` has after a forward,
        [N, width], are kept. `crossings` are those of the model, if it is captured.
        """
        self._forward, self._tap, self._crossings = forward, tap, crossings
        self._states: dict[int, torch.Tensor] = {}  # of the graphs' rows
        self._counts, self.max_rows = list(counts), counts[-1]
        self._pool = pool
        self._devices = [part.device for part in pool.shape.parts]
        pages = page_count(positions, pool.page_tokens)
        # By kind of layers, and also where no layer has attention: tokens enter on the first device.
        sizes = [(each.device, max(each.shape.key_dim, each.shape.value_dim)) for each in pool.kinds]
        if self._devices[0] not in dict(sizes):
            sizes.append((self._devices[0], 0))
        works = {width: TextWork(width, pool.shape.dtype, groups, positions, self._devices) for _, width in sizes}
        self._rows = [DeviceRows(device, self.max_rows, pages, works[width]) for device, width in sizes]
        self._inputs = self._rows[[device for device, _ in sizes].index(self._devices[0])]
        self._attention = KernelAttention(pool, self._rows)
        self._recurrent = states_of(pool.shape.recurrent, self.max_rows)  # by device
        self.counters: Sequence[torch.Tensor] = ()  # of products; graphs clear them first, in case a forward was interrupted
        self.touched: TouchedExperts | None = None
        self.tiles_file: Path | None = None  # of sizes that earlier starts have found
        self._graphs: dict[int, StagedGraph] = {}
        self._logits: dict[int, torch.Tensor] = {}

    def __call__(self, segments: Sequence[Segment]) -> torch.Tensor:
        """The logits are valid until the next call. The caches have room for the rows.

        With recurrent layers, known rows are computed again, because later ones follow from what they do to the states. If all
        rows do not fit, the segments take turns, and so do the parts of a long chain.
        """
        computed = segments if not self._recurrent else [each._replace(batch=replace(each.batch, known=0)) for each in segments]
        rows = sum(each.rows for each in computed)
        if rows > self.max_rows:
            return self._in_turns(segments)
        pieces = [piece for each in computed for piece in pieces_of(cast(PagedCache, each.cache), each.batch, each.shift)]
        count = self._counts[bisect_left(self._counts, rows)]
        with on_device(self._devices[0]):
            self._pool.settle()
            self._set(pieces, count)
            if self._recurrent:
                enter(self._recurrent, segments)
            if self.touched is not None:
                self.touched.clear()
            if count in self._graphs:
                self._graphs[count].replay()
                logits = self._logits[count]
            else:
                logits = self._run(count)
            if self.touched is not None:
                self.touched.fetch()
            if self._tap is not None:
                keep_hidden(self._states[count] if count in self._graphs else self._tap.states, computed)
            return kept(logits, segments, [each.rows for each in computed])

    def _in_turns(self, segments: Sequence[Segment]) -> torch.Tensor:
        """`__call__` in several forwards."""
        if len(segments) > 1:
            half = len(segments) // 2
            return torch.cat([self(part).clone() for part in (segments[:half], segments[half:])])
        [whole], most = segments, self.max_rows
        assert not self._recurrent, "a part needs the states after the one before"
        starts = range(whole.batch.known, len(whole.batch), most)
        parts = [whole._replace(batch=whole.batch.part(start, min(start + most, len(whole.batch)))) for start in starts]
        logits = [self([part]).clone() for part in parts]
        return torch.cat(logits) if whole.logits else logits[-1]

    def _set(self, pieces: Sequence[Piece], count: int) -> None:
        """Uploads the inputs of a forward of `count` rows to all devices."""
        for work in dict.fromkeys(rows.work for rows in self._rows):
            own = [rows for rows in self._rows if rows.work is work]
            packed = own[0].packed(pieces, count)
            for rows in own:
                rows.upload(packed)

    @torch.inference_mode()
    def _run(self, count: int) -> torch.Tensor:
        recurrence = KernelRecurrence(self._recurrent) if self._recurrent else None
        tokens, positions = (each[:count] for each in (self._inputs.tokens, self._inputs.positions))
        return self._forward(tokens, positions, self._attention, recurrence=recurrence)

    def capture(self) -> None:
        """Captures all graphs, the largest first so that the others reuse its memory. Raises ModelError and CompileError.

        If anything else fails, there are no graphs: what a model of any architecture calls may need the host.
        """
        try:
            self._capture()
        except OutOfResources as error:
            dtype = str(self._pool.shape.dtype).removeprefix("torch.")
            raise ModelError(
                f"The kernels do not fit this GPU in {dtype}; set model.dtype to bfloat16: {first_sentence(error)}"
            ) from None
        except CompileError:
            raise
        except Exception as error:
            for made in (self._graphs, self._logits, self._states):
                made.clear()
            log.debug("the capture failed", exc_info=True)
            cause = error.__context__ if isinstance(error.__context__, Exception) else error  # the end of a capture fails, too
            log.warning(
                "CUDA cannot capture this model's forward, so kernels are launched one by one: %s", first_sentence(cause)
            )

    def _capture(self) -> None:
        log.info("capturing CUDA graphs; the first start of a model also compiles its kernels, which may take minutes")
        counts = self._counts[::-1]
        with on_device(self._devices[0]):
            self._set([], self.max_rows)
            capture = CudaCapture(self._devices)
            with capture.aside(), self._timed_tiles(), timed("compiling kernels"), compiled_together():
                self.run_all()
            with timed(f"capturing {len(counts)} CUDA graphs for {counts[-1]} to {self.max_rows} rows"):
                for count in counts:
                    with capture.aside():  # allocates workspaces outside the graph
                        self._run(count)
                    self.capture_rows(count, capture)
                for device in self._devices:
                    torch.cuda.synchronize(device)

    def run_all(self) -> None:
        """Forwards of all numbers of rows, whose logits nobody reads."""
        for count in self._counts[::-1]:
            self._run(count)

    @contextmanager
    def _timed_tiles(self) -> Iterator[None]:
        """Finds the fastest tiles of the products that are compiled inside, on each GPU."""
        with ExitStack() as stack:
            for device in self._devices:
                if device.type == "cuda":
                    stack.enter_context(on_device(device))
                    stack.enter_context(tuning_of(device).timed(replayed_seconds, self.tiles_file))
            yield

    @torch.inference_mode()
    def capture_rows(self, count: int, capture: Capture) -> None:
        """Captures the forward of this number of rows."""
        assert self._crossings is not None
        graph = StagedGraph(capture, self._clear)
        with graph.recorded(self._crossings):
            self._logits[count] = self._run(count)
            if self._tap is not None:
                self._states[count] = self._tap.states
        self._graphs[count] = graph

    def _clear(self, device: torch.device) -> None:
        """Clears the counters of a device: one that is not zero would make all later sums wrong, without an error."""
        if own := [each for each in self.counters if each.device == device]:
            torch._foreach_zero_(own)

    def capture_model(self, model: PreTrainedModel, compile: str) -> None:
        """`capture` of this model's forward, compiled if that is possible. `compile` as in LoadOptions. Raises ModelError."""
        self.counters = counters_of(model)
        try:
            with nullcontext() if compile == "off" else compiled_layers(model):
                self.capture()
        except CompileError as error:
            if compile == "on":
                raise ModelError(f"torch.compile failed for this model: {first_sentence(error)}") from None
            log.warning("torch.compile failed for this model, so its steps are slower: %s", first_sentence(error))
            self.capture()


def can_capture(module: torch.nn.Module, model: PreTrainedModel) -> bool:
    """Whether what a module of the model computes needs no host, so that a graph can repeat it.

    Experts that transformers computes do not if it does by PyTorch's grouped products, whose kernels need bfloat16 and compute
    capability 9 or 10; elsewhere, also on later GPUs, PyTorch asks the host for the groups' sizes.
    """
    named = ((name.rpartition(".")[2], each) for name, each in module.named_modules())
    mixtures = [each for name, each in named if "expert" in name and not name.startswith("shared_expert")]
    if all(isinstance(each, KernelExperts) for each in mixtures):
        return True
    is_grouped = model.config.get_text_config()._experts_implementation == "grouped_mm" and model.dtype == torch.bfloat16
    return is_grouped and torch.cuda.get_device_capability(model.device)[0] in GROUPED_CAPABILITIES


def kept(logits: torch.Tensor, segments: Sequence[Segment], rows: Sequence[int]) -> torch.Tensor:
    """The segments' kept rows among the logits of all; a view if they are the first ones. `rows` are those of each segment."""
    parts, start, leading = [], 0, 0
    for each, computed in zip(segments, rows, strict=True):
        start += computed
        parts.append(logits[start - each.kept : start])
        leading += each.kept
    return logits[:leading] if leading == start else torch.cat(parts)


class StagedGraph:
    """One captured forward."""

    def __init__(self, capture: Capture, prepare: Callable[[torch.device], None]) -> None:
        """`prepare` is what each stage on a device begins with."""
        self._capture, self._prepare = capture, prepare
        self._stages: list[Callable[[], Any]] = []
        self._open = ExitStack()  # the graph that is being captured

    @contextmanager
    def recorded(self, crossings: Crossings) -> Iterator[None]:
        """Captures the forward inside the context, which begins and ends on the first device."""
        crossings.recorder = self
        try:
            with self._open:
                self._begin(crossings.first)
                yield
        finally:
            crossings.recorder = None

    def _begin(self, device: torch.device) -> None:
        self._device = device
        self._stages.append(self._open.enter_context(self._capture(device)))
        self._prepare(device)

    def turn(self, device: torch.device) -> None:
        """Continues with what is launched on this device; a replay launches it while other devices compute."""
        if device != self._device:
            self._open.close()
            self._begin(device)

    def copy(self, tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
        """Copies the tensors to the device on which the forward continues, into memory that each replay reads."""
        self._open.close()
        copies = [tensor.to(device) for tensor in tensors]
        for tensor, copy in zip(tensors, copies, strict=True):
            self._stages.append(partial(copy.copy_, tensor))
        self._begin(device)
        return copies

    @torch.inference_mode()
    def replay(self) -> None:
        """Repeats the forward. Devices wait for each other in their streams, without the host."""
        for stage in self._stages:
            stage()


class CudaCapture:
    """Captures CUDA graphs, on one side stream per device; graphs of a device share their memory."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._streams = {device: torch.cuda.Stream(device) for device in devices}
        self._pools = {device: torch.cuda.graph_pool_handle() for device in devices}

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Runs what is launched inside the context on the side streams; afterwards, the current ones wait for them."""
        with ExitStack() as inside:
            for stream in reversed(self._streams.values()):  # so that the first device is the current one
                stream.wait_stream(torch.cuda.current_stream(stream.device))
                inside.enter_context(torch.cuda.stream(stream))
            yield
        for stream in self._streams.values():
            torch.cuda.current_stream(stream.device).wait_stream(stream)

    @contextmanager
    def __call__(self, device: torch.device) -> Iterator[Callable[[], Any]]:
        """See `Capture`. Other threads' work on the device does not end the capture.

        A failed capture leaves the current stream and the allocator as they were, which PyTorch does not.
        """
        graph, thread, pool = torch.cuda.CUDAGraph(), "thread_local", self._pools[device]
        with torch.cuda.stream(torch.cuda.current_stream(device)):
            try:
                with torch.cuda.graph(graph, pool, self._streams[device], capture_error_mode=thread):
                    yield graph.replay
            except Exception:
                with suppress(RuntimeError):  # it has ended, if the error was not CUDA's
                    torch._C._cuda_endAllocateToPool(device.index or 0, pool)
                    torch._C._cuda_releasePool(device.index or 0, pool)
                raise
