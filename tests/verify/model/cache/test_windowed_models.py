"""Models whose layers have sliding windows: what a slot has released changes no answer, however its text is continued."""

import functools
import sys

import pytest
import torch

from outrider.verify.model.attention.interface import NAME
from outrider.verify.model.batch import ForwardBatch
from outrider.verify.model.cache import kv_cache, windows
from outrider.verify.model.cache.tensor_cache import TensorCache
from outrider.verify.model.loading import prepare
from outrider.verify.model.torch_runner import TorchRunner
from tests.verify.model.families import build

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is returned on Linux only")
# All layers with a window, some, with sinks, and with layers of several shapes that share keys.
NAMES = ("mistral", "qwen2", "gpt_oss", "gemma4")
TEXT = torch.randint(3, 97, (110,), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "PAGE_TOKENS", 4)
    monkeypatch.setattr(windows, "MARGIN_TOKENS", 8)
    monkeypatch.setattr(windows, "BATCH_PAGES", 1)


@functools.cache
def runner_of(name: str) -> TorchRunner:
    model = build(name, NAME)
    prepare(model, None)
    return TorchRunner(model, pack=True)


def spoil(runner: TorchRunner, cache: TensorCache) -> None:
    """Makes a read of a released row change the logits: memory that is smaller than a page of the system is not returned."""
    for layer, planes in zip(runner.cache_shape.layers, cache.layers, strict=True):
        for page in cache.released if layer.window is not None else ():
            for plane in planes:
                plane[:, page * 4 : page * 4 + 4] = 50.0


def read(runner: TorchRunner, cache: TensorCache, step: int = 9) -> list[torch.Tensor]:
    """The logits of the text's rest, read in steps."""
    found = []
    for start in range(cache.length, len(TEXT), step):
        rows = TEXT[start : start + step]
        spoil(runner, cache)
        found.append(runner.forward(cache, ForwardBatch.chain(rows)).clone())
        cache.length = start + len(rows)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_released_rows_change_no_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runner_of(name)
    found = read(runner, cache := runner.new_cache())
    assert len(cache.released) > 15
    monkeypatch.setattr(windows, "MARGIN_TOKENS", 1000)
    expected = read(runner, cache := runner.new_cache())
    assert not cache.released
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
