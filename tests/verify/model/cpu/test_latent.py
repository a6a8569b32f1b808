"""Latent attention over latents: what a position takes, and the logits of transformers' own form."""

from __future__ import annotations

import pytest
import torch

from outrider.verify.model.attention.interface import NAME
from outrider.verify.model.attention.torch_attention import ABSORBED_ROWS
from outrider.verify.model.batch import ForwardBatch
from outrider.verify.model.cache.shape import LayerShape
from outrider.verify.model.cpu.native import interface as native
from outrider.verify.model.load_options import Quantization
from outrider.verify.model.quantization import quantize_layers
from outrider.verify.model.torch_runner import TorchRunner
from tests.verify.model.families import build


def test_a_position_is_stored_once_for_all_heads() -> None:
    runner = TorchRunner(build("deepseek_v3", NAME), 64)
    assert set(runner.cache_shape.layers) == {LayerShape(1, 16 + 4, 0)}  # rank and rotary part
    assert runner.cache_shape.bytes_for(1) == 4 * len(runner.cache_shape.layers) * (16 + 4)


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "glm4_moe_lite"])
def test_long_parts_and_steps_equal_transformers(family: str) -> None:
    runner, text = TorchRunner(build(family, NAME), 256, pack=True), 3 + torch.arange(ABSORBED_ROWS + 12) % 60
    with torch.inference_mode():
        expected = build(family, "eager")(text[None]).logits[0]
    cache = runner.new_cache()
    for start, end in ((0, 3), (3, 5 + ABSORBED_ROWS), (5 + ABSORBED_ROWS, len(text))):  # the second one is expanded
        found = runner.forward(cache, ForwardBatch.chain(text[start:end]))
        assert torch.allclose(found, expected[start:end], atol=1e-4)
        cache.length = end


def test_quantised_layers_keep_keys_and_values() -> None:
    if native.compiled_library() is None:
        pytest.skip("the library was not compiled")
    config = build("deepseek_v3", NAME).config
    config.kv_lora_rank = 32  # whole blocks
    model = type(build("deepseek_v3", NAME))(config)
    quantize_layers(model, Quantization("int8"), torch.device("cpu"))
    assert set(TorchRunner(model, 64).cache_shape.layers) == {LayerShape(4, 12, 6)}
