"""Attention layers older than transformers' attention interface: layouts of projections, ALiBi, refusals."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from outrider.verify.errors import ModelError
from outrider.verify.model.attention.dot_product import dot_product_attention
from outrider.verify.model.attention.interface import NAME
from outrider.verify.model.attention.older import Alibi, Heads, split
from outrider.verify.model.batch import ForwardBatch
from outrider.verify.model.load_options import LoadOptions
from outrider.verify.model.loading import load_model
from outrider.verify.model.packed import packed_layers
from outrider.verify.model.torch_runner import TorchRunner
from tests.verify.model.families import build, text_of, tolerance

FAMILIES = ["falcon", "falcon_groups", "falcon_heads", "falcon_alibi", "falcon_shared_alibi", "bloom_six", "mpt_six", "gptj"]


@pytest.mark.slow
def test_no_module_of_transformers_is_changed_before_such_a_model_is_loaded() -> None:
    loads = "from outrider import models; from outrider.verify.model.loading import load_model; import sys\n"
    loads += "from outrider.verify.model.load_options import LoadOptions\n"
    loads += "load_model(LoadOptions(str(models.DRAFT), dtype='float32', device='cpu'))\n"
    loads += "print([name for name in sys.modules if '.modeling_falcon' in name or name.endswith('attention.older')])"
    done = subprocess.run([sys.executable, "-c", loads], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("family", [*FAMILIES, "codegen", "gpt_neo", "gpt_neox_japanese"])
def test_logits_equal_transformers(family: str) -> None:
    runner, text = TorchRunner(build(family, NAME)), text_of(24)
    cache, found = runner.new_cache(), []
    for start, stop in ((0, 13), (13, 14), (14, 24)):
        found.append(runner.forward(cache, ForwardBatch.chain(text[start:stop])).clone())
        cache.length = stop
    with torch.inference_mode():
        expected = build(family, "eager")(text[None], use_cache=False).logits[0]
    assert torch.allclose(torch.cat(found), expected, atol=tolerance(family))


@pytest.mark.parametrize("family", ["falcon_alibi", "bloom_six", "mpt_six"])
def test_logits_at_long_positions_equal_transformers(family: str) -> None:
    """Biases of hundreds, beside which float32 has few digits left."""
    runner, text = TorchRunner(build(family, NAME)), text_of(500)
    with torch.inference_mode():
        expected = build(family, "eager")(text[None], use_cache=False).logits[0]
    assert torch.allclose(runner.forward(runner.new_cache(), ForwardBatch.chain(text)), expected, atol=tolerance(family))


# Products of bfloat16 round scores, of which some are of the size of a slope times SAMPLED.
@pytest.mark.parametrize(
    ("dtype", "is_fast", "error"),
    [(torch.float32, False, 2e-5), (torch.float16, False, 2e-3), (torch.bfloat16, False, 2e-2), (torch.bfloat16, True, 6e-2)],
)
@pytest.mark.parametrize("start", [0, 2000, 60000])
def test_alibi_is_exact_at_long_positions(dtype: torch.dtype, is_fast: bool, error: float, start: int) -> None:
    generator, scaling = torch.Generator().manual_seed(2), 128**-0.5
    query, key, value = (torch.randn(1, 3, 300, 128, generator=generator).to(dtype) for _ in range(3))
    positions = torch.arange(start, start + 300)
    slopes = torch.tensor([0.7, 0.037, 0.0039], dtype=torch.float64)
    mask = torch.full((300, 300), -torch.inf).triu(1)
    distances = (positions - start).double() - 300
    scores = query[0].double() @ key[0].double().transpose(1, 2) * scaling + slopes[:, None, None] * distances + mask
    extended = Alibi(slopes, scaling).extend(Heads(query, key, value), positions)
    assert {each.shape[-1] for each in extended} == {136}
    rows, keys, values = (each[0] for each in extended)
    out = dot_product_attention(rows, keys, values, mask.to(dtype), scaling, is_fast)
    assert (out[..., :128].double() - scores.softmax(-1) @ value[0].double()).abs().max() < error
    assert not out[..., 128:].any()


def test_a_fused_projection_is_split_by_key_heads() -> None:
    fused = torch.arange(24.0).view(1, 1, 24)  # two key heads with two query heads each, of width 3
    query, key, value = split(fused, 2, 3)
    assert query[0, :, 0].tolist() == [[0, 1, 2], [3, 4, 5], [12, 13, 14], [15, 16, 17]]
    assert key[0, :, 0].tolist() == [[6, 7, 8], [18, 19, 20]]
    assert value[0, :, 0].tolist() == [[9, 10, 11], [21, 22, 23]]


def test_only_keys_without_biases_are_kept_in_8_bits() -> None:
    assert TorchRunner(build("falcon", NAME), kv_dtype="int8").cache_shape.coded is torch.int8
    for family in ("bloom", "mpt", "falcon_alibi"):
        with pytest.raises(ModelError, match=r"set model\.kv_dtype to auto"):
            TorchRunner(build(family, NAME), kv_dtype="int8")


@pytest.mark.parametrize("family", ["falcon_groups", "mpt"])
def test_a_checkpoint_is_served_with_packed_layers(family: str, tmp_path: Path) -> None:
    model = build(family, "eager")
    model.save_pretrained(tmp_path)
    runner = load_model(LoadOptions(str(tmp_path), device="cpu"))
    assert isinstance(runner, TorchRunner)
    assert runner.model_tokens == 512 and runner.mode.backend is not None
    assert len(packed_layers(runner.model)) == 4 * 4 + 1  # in each layer four, and the head
