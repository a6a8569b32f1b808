"""A traced forward is bit-identical to the model's at any size; unsupported models are not traced."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.drafters.interface import DraftTree
from outrider.verify.model.attention import dot_product
from outrider.verify.model.attention.interface import NAME
from outrider.verify.model.batch import ForwardBatch
from outrider.verify.model.cpu.trace import TracedForward
from outrider.verify.model.loading import prepare
from outrider.verify.model.torch_runner import TorchRunner
from tests.trees import trees
from tests.verify.model.test_architectures import WINDOW, make

TRACED = ["gemma3", "phi3", "phi3, longrope", "gpt2", "olmo2", "granite"]


def runner(name: str, pack: bool, traced: bool) -> TorchRunner:
    model = make(name, NAME)
    prepare(model, None)
    return TorchRunner(model, pack=pack, traced=traced)


def is_traced(runner: TorchRunner) -> bool:
    return isinstance(runner.mode.backend, TracedForward)


@pytest.fixture(scope="module", params=TRACED)
def pair(request: pytest.FixtureRequest) -> tuple[TorchRunner, TorchRunner]:
    """The same packed model without and with a trace."""
    plain, traced = runner(request.param, True, False), runner(request.param, True, True)
    assert is_traced(traced)
    assert not is_traced(plain)
    return plain, traced


@settings(max_examples=15)
@given(tree=trees(nodes=20), length=st.integers(0, 60))
def test_any_tree_after_any_text(pair: tuple[TorchRunner, TorchRunner], tree: DraftTree, length: int) -> None:
    batch = ForwardBatch.tree(7, tree)
    found = []
    for each in pair:
        cache = each.new_cache()
        cache.tensor.normal_(generator=torch.Generator().manual_seed(length))
        cache.length = length
        found.append(each.forward(cache, batch))
        found.append(cache.tensor[:, :, :, : length + len(batch)].clone())
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "mixtral", "qwen3_moe"])
def test_soft_capping_sinks_and_experts_are_not_traced(name: str) -> None:
    assert not is_traced(runner(name, True, True))


def test_unpacked_models_are_traced_too() -> None:
    plain, traced = runner("llama", False, False), runner("llama", False, True)
    assert is_traced(traced)
    batch = ForwardBatch.chain(torch.arange(3, 20))
    assert torch.equal(plain.forward(plain.new_cache(), batch), traced.forward(traced.new_cache(), batch))


def test_attention_by_products_of_bfloat16_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dot_product, "chosen", lambda *_: dot_product.fast_attention)
    plain, traced = (TorchRunner(make("phi3", NAME).bfloat16(), traced=traced) for traced in (False, True))
    assert is_traced(traced)
    assert traced.kernels.endswith("attention: products of bfloat16")
    batch = ForwardBatch.chain(torch.arange(3, 3 + 2 * dot_product.LEAST_ROWS) % 60)
    assert torch.equal(plain.forward(plain.new_cache(), batch), traced.forward(traced.new_cache(), batch))


@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("traced", [False, True])
def test_layers_with_a_window_read_no_earlier_rows(rows: int, traced: bool) -> None:
    each = runner("phi3", True, traced)  # all layers have a window
    cache = each.new_cache()
    cache.tensor.normal_(generator=torch.Generator().manual_seed(1))
    cache.length = 50
    expected = each.forward(cache, ForwardBatch.chain(torch.arange(rows))).clone()
    cache.tensor[:, :, :, : 50 - WINDOW + 1] = math.nan
    assert torch.equal(each.forward(cache, ForwardBatch.chain(torch.arange(rows))), expected)
