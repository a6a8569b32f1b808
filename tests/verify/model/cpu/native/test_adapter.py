"""LoRA adapters in the library: peft's logits, and the same bits for a row beside rows of other adapters."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from outrider.verify.errors import ModelError
from outrider.verify.model.adapter import Adapter
from outrider.verify.model.backend import load_adapter
from outrider.verify.model.batch import ForwardBatch, Segment
from outrider.verify.model.cpu.native.library import compiled_library
from outrider.verify.model.cpu.native.runner import NativeRunner
from outrider.verify.model.runner import ModelRunner
from tests.adapters import PROJECTIONS, save_adapter
from tests.verify.model.cpu.native.models import build
from tests.verify.model.cpu.native.test_forward import runner

pytestmark = pytest.mark.skipif(compiled_library() is None, reason="the library was not compiled")
TOKENS = torch.arange(3, 60)
# Ranks: odd, the largest of several, and that of one projection.
ADAPTERS: Mapping[str, dict[str, Any]] = {
    "all": {"rank": 5},
    "some": {"rank": 70, "projections": ("q_proj", "v_proj", "up_proj"), "use_rslora": True},
    "one": {"rank": 1, "projections": ("down_proj",)},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str | None, torch.Tensor]:
    found: dict[str | None, torch.Tensor] = {}
    with torch.inference_mode():
        found[None] = build("qwen2")(TOKENS[None]).logits[0]
        for seed, (name, options) in enumerate(ADAPTERS.items()):
            adapted = save_adapter(build("qwen2"), folder / name, seed=seed, **options)
            found[name] = adapted(TOKENS[None]).logits[0]
    return found


@pytest.fixture(scope="module", params=["float32", "int8"])
def served(request: pytest.FixtureRequest) -> NativeRunner:
    return runner("qwen2", request.param)


@pytest.fixture(scope="module")
def held(served: NativeRunner, folder: Path, expected: object) -> dict[str | None, Adapter | None]:
    return {None: None, **{name: load_adapter(served, str(folder / name)) for name in ADAPTERS}}


def logits(served: NativeRunner, *adapters: Adapter | None) -> list[torch.Tensor]:
    segments = [Segment(served.new_cache(), ForwardBatch.chain(TOKENS), adapter=adapter) for adapter in adapters]
    return [torch.from_numpy(each.copy()) for each in served.forward_all(segments)]


def test_logits_are_those_of_peft(
    served: NativeRunner, held: dict[str | None, Adapter | None], expected: dict[str | None, torch.Tensor]
) -> None:
    limit = 1e-5 if served.weight_bits == 32 else 0.2
    for name, adapter in held.items():
        [found] = logits(served, adapter)
        assert (found - expected[name]).norm() < limit * expected[name].norm(), name
        assert name is None or (expected[name] - expected[None]).norm() > 0.3 * expected[None].norm()


def test_of_latent_attention_queries_and_outputs_are_adapted(tmp_path: Path) -> None:
    served = runner("deepseek_v2")
    with torch.inference_mode():
        expected = save_adapter(build("deepseek_v2"), tmp_path, 5, ("q_proj", "o_proj"))(TOKENS[None]).logits[0]
    [found] = logits(served, load_adapter(served, str(tmp_path)))
    assert (found - expected).norm() < 1e-4 * expected.norm()
    save_adapter(build("deepseek_v2"), tmp_path, 5, ("kv_b_proj",))
    with pytest.raises(ModelError, match=r"kv_b_proj\.lora_A\.weight', which is not supported; merge it instead"):
        load_adapter(served, str(tmp_path))


def test_a_row_has_the_same_bits_beside_other_adapters(served: NativeRunner, held: dict[str | None, Adapter | None]) -> None:
    order = [None, "some", "all", "one", "all", None]
    for name, found in zip(order, logits(served, *(held[name] for name in order)), strict=True):
        assert np.array_equal(found, logits(served, held[name])[0]), name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_dora": True}, "has use_dora: True, which is not supported; merge it instead"),
        ({"bias": "all"}, "has bias: 'all', which is not supported"),
        ({"modules_to_save": ["lm_head"]}, "has modules_to_save: "),
        ({"projections": ["q_proj", "lm_head"]}, "changes 'base_model.model.lm_head.lora_[AB].weight', which is not supported"),
    ],
)
def test_adapters_that_are_more_than_low_rank_products_are_refused(
    served: NativeRunner, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    save_adapter(build("qwen2"), tmp_path, 4, **options)
    with pytest.raises(ModelError, match=message):
        load_adapter(served, str(tmp_path))


def test_files_that_are_no_adapter_of_the_model_are_refused(served: NativeRunner, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="There is no folder '/nowhere'; give an adapter's folder"):
        load_adapter(served, "/nowhere")
    with pytest.raises(ModelError, match=r"No adapter at '.*': the folder has no adapter_config\.json"):
        load_adapter(served, str(tmp_path))
    save_adapter(build("qwen2", hidden_size=128), tmp_path, 4, PROJECTIONS)
    with pytest.raises(
        ModelError, match=r"another model: it changes down of layer 0 by 128 x 96, and the model has 64 x 96; name"
    ):
        load_adapter(served, str(tmp_path))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(ModelError, match="is damaged"):
        load_adapter(served, str(tmp_path))


def test_a_model_that_the_library_does_not_compute_takes_no_adapter(tiny_runner: ModelRunner) -> None:
    with pytest.raises(ModelError, match="adapters need a model that the compiled library computes"):
        load_adapter(tiny_runner, "anything")
