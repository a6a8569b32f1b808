"""Layers with a sliding window: which rows are released, what remains of them, and that this changes no logits."""

import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.verify.model.attention.interface import NAME
from outrider.verify.model.batch import ForwardBatch
from outrider.verify.model.cache import kv_cache, windows
from outrider.verify.model.cache.kv_cache import Rows, SwappedRows, distinct_bytes
from outrider.verify.model.cache.shape import CacheShape, LayerShape
from outrider.verify.model.cache.tensor_cache import TensorCache
from outrider.verify.model.cache.windows import held_bytes, held_positions
from outrider.verify.model.loading import prepare
from outrider.verify.model.torch_runner import TorchRunner
from tests.patches import patched
from tests.servers import resident_mb
from tests.verify.model.families import build

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is returned on Linux only")
CPU = torch.device("cpu")
WINDOW, POSITIONS = 5, 160
# A row of a head is at least 4 KiB in a layer with a window, so that each released row is a page of the system.
ALIKE = CacheShape(
    (LayerShape(1, 1024, 1024, WINDOW), LayerShape(1, 1024, 1024), LayerShape(1, 1024, 1024, 3)), torch.float32, CPU
)
MIXED = CacheShape((LayerShape(1, 1024, 2048, WINDOW), LayerShape(2, 4, 8), LayerShape(1, 1024, 4)), torch.float32, CPU)
ALL = CacheShape((LayerShape(1, 1024, 1024, WINDOW),) * 2, torch.float32, CPU)
NONE = CacheShape((LayerShape(3, 4, 4),) * 2, torch.float32, CPU)
small_pages = patched(kv_cache, PAGE_TOKENS=4)
small_batches = patched(windows, MARGIN_TOKENS=8, BATCH_PAGES=2, FORWARD_TOKENS=8)


def write(cache: TensorCache, rows: list[float], shape: CacheShape) -> None:
    """Commits rows of these values, and releases what is behind the windows."""
    values = torch.tensor(rows)[None, :, None]
    for layer, (heads, key_dim, value_dim, _) in enumerate(shape.layers):
        cache.write(layer, values.expand(heads, -1, key_dim), -values.expand(heads, -1, value_dim))
    cache.commit(list(range(len(rows))))
    cache.release()


def filled(shape: CacheShape, length: int = 100) -> TensorCache:
    cache = TensorCache(shape, POSITIONS)
    write(cache, [1.0 + at for at in range(length)], shape)
    return cache


def check(cache: TensorCache, expected: list[float], shape: CacheShape) -> None:
    """All rows of layers without a window, and the last ones of the others; released rows are zeros."""
    assert cache.length == len(expected)
    for layer, (keys, values) in zip(shape.layers, cache.layers, strict=True):
        first = 0 if layer.window is None else max(0, cache.length - WINDOW)
        for head, sign in ((keys[0].view(np.float32), 1), (values[-1].view(np.float32), -1)):
            assert head[first : cache.length, -1].tolist() == [sign * each for each in expected[first:]]
            for page in cache.released if layer.window is not None and head.shape[1] >= 1024 else ():
                assert not head[page * 4 : page * 4 + 4].any()


@pytest.mark.parametrize("shape", [ALIKE, MIXED, ALL])
def test_a_swapped_slot_takes_the_memory_of_the_rows_that_are_left(shape: CacheShape) -> None:
    cache = filled(shape)
    released = len(cache.released) * 4
    held = distinct_bytes([cache], shape)
    assert held == shape.bytes_for(100) - shape.windowed_bytes_for(released) < shape.bytes_for(100)
    swapped = cache.swap_out()
    assert distinct_bytes([swapped], shape) == held
    assert sum(part.nbytes for part in swapped.parts(100)) == held


def test_a_slot_holds_no_more_than_is_planned() -> None:
    cache = filled(ALIKE, 0)
    for length in range(1, POSITIONS + 1):
        write(cache, [0.0], ALIKE)
        if not length % 9:
            cache.fork(cache.swap_out(), length)
        assert length - 4 * len(cache.released) <= held_positions(length, WINDOW)
        assert ALIKE.bytes_for(length) - ALIKE.windowed_bytes_for(4 * len(cache.released)) <= held_bytes(ALIKE, length)


@pytest.mark.parametrize("kind", ["truncate", "fork", "swap"])
def test_a_slot_returns_the_memory_of_a_longer_text(kind: str) -> None:
    """Otherwise, the ends of texts of several lengths would add up."""
    cache = filled(ALIKE, 100)
    if kind == "truncate":
        cache.truncate(62)
    elif kind == "fork":
        cache.fork(filled(ALIKE, 62), 62)
    else:
        cache.swap_out()
    assert not any(plane[:, 64:].any() for layer in (0, 2) for plane in cache.layers[layer])
    assert cache.layers[1][0].view(np.float32)[:, :100].all()


OPERATIONS = st.tuples(
    st.sampled_from(["write", "truncate", "swap", "fork"]), st.integers(0, 2), st.integers(0, 2), st.integers(0, 150)
)


@pytest.mark.parametrize("shape", [ALIKE, MIXED, NONE])
@settings(max_examples=25)
@given(st.lists(OPERATIONS, min_size=4, max_size=10))
def test_holders_have_their_windows(shape: CacheShape, operations: list[tuple[str, int, int, int]]) -> None:
    """Whatever others write, truncate, fork and swap, and whichever of their pages they release."""
    slots = [TensorCache(shape, POSITIONS) for _ in range(3)]
    holders: list[Rows] = [*slots]
    expected: list[list[float]] = [[], [], []]
    for clock, (kind, at, source, length) in enumerate(operations):
        if isinstance(rows := holders[at], SwappedRows):
            holders[at] = slots[at]
            slots[at].fork(rows, rows.length)
        slot = slots[at]
        if kind == "write":
            added = [clock + step / 256 for step in range(max(0, length - slot.length))]
            write(slot, added, shape)
            expected[at] = expected[at] + added
        elif kind == "truncate":
            slot.truncate(length)
        elif kind == "fork" and source != at:
            slot.fork(holders[source], length)
            expected[at] = expected[source]
        expected[at] = expected[at][: slot.length]
        check(slot, expected[at], shape)
        if kind == "swap":
            holders[at] = slot.swap_out()


def test_released_rows_take_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "PAGE_TOKENS", 256)
    shape = CacheShape(
        (LayerShape(2, 64, 64, 100), *[LayerShape(2, 64, 64, 200)] * 14, LayerShape(2, 64, 64)), torch.float32, CPU
    )
    before = resident_mb()
    cache = TensorCache(shape, 5000)
    cache.fill(5000)
    full = resident_mb() - before
    cache.release()
    assert full > 75
    assert resident_mb() - before < 0.4 * full


# All layers with a window, some, with sinks, and with layers of several shapes that share keys.
NAMES = ("mistral", "qwen2", "gpt_oss", "gemma4")
TEXT = torch.randint(3, 97, (110,), generator=torch.Generator().manual_seed(1))


def read(runner: TorchRunner, cache: TensorCache, step: int = 8) -> list[torch.Tensor]:
    """The logits of the text's rest, read in steps; a read of a released row would change them."""
    found = []
    for start in range(cache.length, len(TEXT), step):
        rows = TEXT[start : start + step]
        for layer, planes in zip(runner.cache_shape.layers, cache.layers, strict=True):
            for page in cache.released if layer.window is not None else ():  # less than a page of the system is not returned
                for plane in planes:
                    plane[:, page * 4 : page * 4 + 4] = 50.0
        found.append(runner.forward(cache, ForwardBatch.chain(rows)).clone())
        cache.length = start + len(rows)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_released_rows_change_no_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(name, NAME)
    prepare(model, None)
    runner = TorchRunner(model, pack=True)
    found = read(runner, cache := runner.new_cache())
    assert len(cache.released) > 12
    monkeypatch.setattr(windows, "MARGIN_TOKENS", 1000)
    expected = read(runner, cache := runner.new_cache())
    assert not cache.released
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
