"""A model without some layers has the whole model's weights and cache, and leaves the whole model as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import LlamaConfig

from outrider.verify.errors import ModelError
from outrider.verify.model.attention import NAME
from outrider.verify.model.batch import ForwardBatch
from outrider.verify.model.cpu.packing import packed_layers
from outrider.verify.model.runner import ModelRunner
from outrider.verify.self_draft.layers import LayerSkipper
from tests.verify.model.families import FAMILIES, SIZES, random_model
from tests.verify.self_draft.targets import LAYERS, layered

TOKENS = torch.arange(3, 12)


def logits(runner: ModelRunner) -> torch.Tensor:
    return runner.forward(runner.new_cache(), ForwardBatch.chain(TOKENS)).clone()


@pytest.mark.parametrize("skipped", [(1, 4), (0,), ()])
def test_the_layers_that_remain_compute_as_a_model_of_their_own(tiny_config: LlamaConfig, skipped: tuple[int, ...]) -> None:
    target = layered(tiny_config, pack=True)
    whole = logits(target)
    shallow = LayerSkipper(target).without(skipped)
    model: Any = layered(tiny_config).model
    model.model.layers = torch.nn.ModuleList(layer for number, layer in enumerate(model.model.layers) if number not in skipped)
    for number, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = number
    expected = logits(ModelRunner(model))
    assert torch.allclose(logits(shallow), expected, atol=1e-5)
    assert torch.equal(logits(target), whole)
    assert shallow.cache_shape == target.cache_shape
    assert {id(layer) for layer in packed_layers(shallow.model)} <= {id(layer) for layer in packed_layers(target.model)}
    shallow.start(64)
    assert torch.allclose(logits(shallow), expected, atol=1e-5)


@pytest.mark.parametrize("name", ["gemma3", "deepseek_v3", "multimodal"])
def test_layers_of_several_kinds_keep_their_numbers(name: str) -> None:
    """A later layer has the window, the rotation and the cache of its own place."""
    target = ModelRunner(random_model(config_of(name), NAME))
    model = target.model
    layers: Any = model.get_decoder()
    original = list(layers.layers)
    shallow = LayerSkipper(target).without([1])
    found = logits(shallow)
    hook = original[1].register_forward_hook(lambda _, inputs, __: inputs[0])
    expected = logits(target)
    hook.remove()
    assert torch.allclose(found, expected, atol=1e-5)
    assert list(layers.layers) == original


def config_of(name: str) -> Any:
    if name == "multimodal":
        return transformers.Gemma3Config(text_config={**SIZES, **MIXED}, vision_config={"num_hidden_layers": 1})
    if name == "gemma3":
        return transformers.Gemma3TextConfig(**{**SIZES, **MIXED})
    family, others = FAMILIES[name]
    return getattr(transformers, f"{family}Config")(**{**SIZES, **others})


MIXED = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 4}


def test_what_cannot_skip_layers_is_refused_with_a_sentence(tiny_config: LlamaConfig) -> None:
    recurrent = ModelRunner(random_model(config_of("qwen3_5"), NAME))
    with pytest.raises(ModelError, match="recurrent layers, whose states cannot be shared"):
        LayerSkipper(recurrent)
    skipper = LayerSkipper(layered(tiny_config))
    for skipped in ([LAYERS], [-1], range(LAYERS)):
        with pytest.raises(ModelError, match="has the layers 0 to 5, of which one must remain"):
            skipper.without(skipped)


def test_a_layer_that_others_need_is_named(tiny_config: LlamaConfig) -> None:
    target = layered(tiny_config)
    model: Any = target.model

    def needs_another(module: Any, inputs: Any) -> None:
        if not ran:
            raise KeyError("shared keys")
        ran.clear()

    ran: list[int] = []
    model.model.layers[1].register_forward_hook(lambda *_: ran.append(1))
    model.model.layers[3].register_forward_pre_hook(needs_another)
    skipper = LayerSkipper(target)
    with pytest.raises(ModelError, match=r"fails without the layers \[1\] \(KeyError: .*change draft_model.skip_layers"):
        skipper.without([1])
