"""The forward captured on a GPU: padded rows of several streams, whose lengths and pages are in device memory.

Without a GPU, the same forward runs uncaptured through Triton's interpreter.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo
from torch.fx.experimental.symbolic_shapes import free_symbols

from outrider.drafters.interface import Source, arrange
from outrider.verify.model.attention.interface import NAME
from outrider.verify.model.batch import ForwardBatch, Segment
from outrider.verify.model.cache.shape import CacheShape
from outrider.verify.model.cache.tensor_cache import TensorCache
from outrider.verify.model.gpu import graphs as graphs_module
from outrider.verify.model.gpu.compilation import CompileError, compiled_layers
from outrider.verify.model.gpu.device_rows import DeviceRows, pieces_of
from outrider.verify.model.gpu.graphs import Forward, GraphedForward
from outrider.verify.model.gpu.paged_cache import PagedCache, PagePool
from outrider.verify.model.gpu.text_work import BLOCK, ROWS, TextWork
from outrider.verify.model.torch_runner import TorchRunner
from tests.verify.model.families import build
from tests.verify.model.gpu.conftest import DEVICE

PREFIX = torch.tensor([5, 9, 60, 3, 44, 7, 7, 21])
POSITIONS = 200


class Graphed:
    """The graphed forward of a runner's model, over a pool of its own."""

    def __init__(
        self, runner: TorchRunner, rows: Sequence[int] = ROWS, capture: bool = True, run: Forward | None = None
    ) -> None:
        self.runner = runner
        self.pool = PagePool(runner.cache_shape, 12)
        for part in self.pool.parts:
            part.tensor.fill_(torch.nan)  # no row is read before it is written
        groups, run = runner._attention_probe.groups, run or partial(runner._run, keep=0)
        self.forward = GraphedForward(run, self.pool, POSITIONS, groups, rows, runner._tap, runner._crossings)
        if capture and runner.device.type == "cuda":
            self.forward.capture()

    def filled(self, length: int = len(PREFIX)) -> tuple[TensorCache, TensorCache]:
        """A contiguous cache that holds the beginning of the prefix, and one in pages."""
        reference, cache = TensorCache(self.runner.cache_shape, POSITIONS), PagedCache(self.pool, POSITIONS)
        self.runner.forward(reference, ForwardBatch.chain(PREFIX[:length]), logits=False)
        reference.length = length
        cache.fork(reference, length)
        return reference, cache

    def __call__(self, *segments: Segment) -> torch.Tensor:
        for each in segments:
            each.cache.reserve(len(each.batch))
        return self.forward(segments)

    def both(self, batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """The batch's logits by the plain forward and by the graphed one."""
        reference, cache = self.filled()
        return self.runner.forward(reference, batch), self(Segment(cache, batch))


def chain(rows: int) -> ForwardBatch:
    return ForwardBatch.chain(torch.arange(3, 3 + rows))


FORK = ForwardBatch.tree(1, arrange([5, 7, 6], [-1, 0, -1], [0.9, 0.5, 0.4], [Source.NONE] * 3)[0])
# The text of one piece of a chain is another one of the same forward, so all rows are written before any attends.
BEYOND_A_BLOCK = chain(BLOCK - len(PREFIX) + 1)


SLOW = [pytest.param(batch, marks=pytest.mark.slow) for batch in (BEYOND_A_BLOCK, chain(32), chain(33))]


@pytest.mark.parametrize("batch", [chain(1), FORK, *SLOW])
def test_rows_are_padded_and_have_the_same_logits(tiny_runner: TorchRunner, batch: ForwardBatch) -> None:
    expected, found = Graphed(tiny_runner).both(batch)
    assert found.shape == (len(batch), tiny_runner.vocabulary)
    assert torch.allclose(found, expected, atol=1e-4)


def test_streams_of_any_length_share_a_forward(tiny_runner: TorchRunner) -> None:
    graphs = Graphed(tiny_runner)
    segments, expected = [], []
    for length, rows, known, logits in ((1, 1, 0, True), (8, 3, 1, True), (4, 4, 0, False)):
        reference, cache = graphs.filled(length)
        batch = ForwardBatch.chain(torch.arange(11, 11 + rows))
        tiny_runner.forward(reference, batch)
        expected.append(tiny_runner.forward(reference, replace(batch, known=known), logits).clone())
        if known:
            graphs(Segment(cache, batch.part(0, known)))
        segments.append((Segment(cache, replace(batch, known=known), logits), reference))
    found = graphs(*(segment for segment, _ in segments)).split([1, 2, 1])
    for (segment, reference), logits, alone in zip(segments, found, expected, strict=True):
        assert torch.allclose(logits, alone, atol=1e-4)
        end = segment.cache.length + len(segment.batch)
        (part,) = segment.cache.parts(end)
        assert torch.allclose(part, reference.tensor[:, :, :, :end], atol=1e-5)


def test_hidden_states_are_kept_with_the_rows() -> None:
    runner = TorchRunner(build("llama", NAME).to(DEVICE), started=False)
    runner.tap_hidden(())
    graphs = Graphed(runner)
    found = []
    forwards: list[Any] = [runner.forward_all, graphs.forward]
    for cache, forward in zip(graphs.filled(), forwards, strict=True):
        cache.reserve(3)
        forward([Segment(cache, ForwardBatch.chain(torch.arange(11, 14)))])
        cache.commit([0, 2])
        assert cache.hidden is not None and cache.hidden.end == len(PREFIX) + 2
        found.append(cache.hidden.read(len(PREFIX), len(PREFIX) + 2))
    assert torch.allclose(found[0], found[1], atol=1e-4)


def test_known_rows_that_do_not_fit_are_computed_in_turns(tiny_runner: TorchRunner) -> None:
    graphs = Graphed(tiny_runner, (1, 2))
    segments = [Segment(graphs.filled(length)[1], ForwardBatch.chain(torch.arange(2))) for length in (1, 8)]
    expected = torch.cat([graphs(each).clone()[1:] for each in segments])
    found = graphs(*(each._replace(batch=replace(each.batch, known=1)) for each in segments))
    assert torch.equal(found, expected)


def test_positions_leave_out_what_pictures_before_the_rows_do_not_take() -> None:
    shape = CacheShape.uniform(layers=1, kv_heads=2, head_dim=16, dtype=torch.float32, device=DEVICE)
    cache, inputs = PagedCache(PagePool(shape, 4), 256), DeviceRows(DEVICE, 72, 4, TextWork(16, shape.dtype, 24, 256, [DEVICE]))
    cache.fill(40)
    cache.reserve(30)
    inputs.set(list(pieces_of(cache, ForwardBatch.chain(torch.arange(30)), shift=12)), 32)
    assert inputs.positions[:30].tolist() == list(range(28, 58))
    assert inputs.rows[2, :30].tolist() == [40] * 24 + [64] * 6  # places in the text


class RefusedCapture:
    """A capture during which nothing may run, as CUDA refuses what needs the host. Implements `CudaCapture`'s methods."""

    is_open = False

    def __init__(self, devices: Sequence[torch.device]) -> None:
        pass

    def aside(self) -> AbstractContextManager[None]:
        return nullcontext()

    @contextmanager
    def __call__(self, device: torch.device) -> Iterator[Callable[[], None]]:
        RefusedCapture.is_open = True
        try:
            yield lambda: None
        finally:
            RefusedCapture.is_open = False
            raise RuntimeError("operation failed due to a previous error during capture")


@pytest.mark.parametrize("when", ["capturing", "warming up"])
def test_a_forward_that_cannot_be_captured_is_launched_kernel_by_kernel(
    tiny_runner: TorchRunner, when: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fails, run = True, partial(tiny_runner._run, keep=0)

    def asks_the_host(*inputs: Any, **others: Any) -> torch.Tensor:
        if fails and RefusedCapture.is_open == (when == "capturing"):
            raise RuntimeError("operation not permitted when stream is capturing")
        return run(*inputs, **others)

    monkeypatch.setattr(graphs_module, "CudaCapture", RefusedCapture)
    graphs = Graphed(tiny_runner, (1, 2, 4), capture=False, run=asks_the_host)
    with caplog.at_level(logging.WARNING):
        graphs.forward.capture()
    [warning] = caplog.messages
    assert warning.endswith("so kernels are launched one by one: operation not permitted when stream is capturing")
    fails = False
    expected, found = graphs.both(chain(3))
    assert torch.allclose(found, expected, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "kinds", "sizes"),
    [("llama", 1, {}), ("qwen3_5", 2, {}), ("bamba", 2, {}), ("kimi_linear", 2, {"mlp_layer_types": ["dense"] * 4})],
)
def test_layers_are_compiled_once_for_all_of_them(
    family: str, kinds: int, sizes: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Code compiled for a layer of a kind and few numbers of rows serves all, with unchanged results.

    Recurrent parts are in it. All sizes but the number of rows, and that of a partial rotation, are constants.
    """
    caplog.set_level(logging.WARNING, "torch.__trace")  # verbose
    runner = TorchRunner(build(family, NAME, **sizes).to(DEVICE), started=False)
    compiled: list[torch.fx.GraphModule] = []

    def count(graph: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
        compiled.append(graph)
        values = [node.meta.get("example_value") for node in graph.graph.nodes if node.op.startswith("call")]
        symbols = {symbol for value in values if isinstance(value, torch.Tensor) for symbol in free_symbols(value.shape)}
        assert len(symbols) <= kinds
        return graph

    graphs = Graphed(runner, capture=False)
    before = [module.forward for module in runner.model.modules()]
    for size in (64, 4, 2, 1):  # attention has larger blocks for the first one, which is also the size of a page
        batch = ForwardBatch.chain(torch.arange(3, 3 + size))
        reference, cache = graphs.filled()
        expected = runner.forward(reference, batch)
        with compiled_layers(runner.model, count):
            assert torch.allclose(graphs(Segment(cache, batch)), expected, atol=1e-4)
    # Each kind of layers, and the last norm, for any number of rows, and for one.
    assert len(compiled) == 2 * kinds + 2
    assert [module.forward for module in runner.model.modules()] == before


def test_a_failed_compilation_is_reported() -> None:
    runner = TorchRunner(build("llama", NAME).to(DEVICE), started=False)
    graphs = Graphed(runner, capture=False)
    _, cache = graphs.filled()

    def refuse(*_: Any) -> None:
        raise ValueError("no")

    with pytest.raises(CompileError, match="no"), compiled_layers(runner.model, refuse):
        graphs(Segment(cache, ForwardBatch.chain(torch.tensor([11]))))
