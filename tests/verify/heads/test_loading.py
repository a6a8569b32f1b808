"""Draft heads from their published layouts, and a sentence for what cannot be loaded."""

import json
from pathlib import Path
from typing import cast

import pytest
import torch
from safetensors.torch import save_file

from outrider import models
from outrider.verify.checkpoint import MTP
from outrider.verify.errors import ModelError
from outrider.verify.heads.loading import load_head
from outrider.verify.heads.networks import Eagle3Head, EagleHead, MtpHead
from outrider.verify.model.backend import load as load_weights
from outrider.verify.model.load_options import LoadOptions
from outrider.verify.model.runner import ModelRunner
from outrider.verify.model.torch_runner import TorchRunner
from tests.hub import MODEL, cache_models
from tests.verify.heads.checkpoints import DRAFT_VOCABULARY, load_pair, save_eagle, save_eagle3, save_target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    path = save_target(tmp_path_factory.mktemp("target"))
    return load_weights(LoadOptions(str(path), dtype="float32", device="cpu"))


def test_a_model_is_no_head(target: ModelRunner, tmp_path: Path) -> None:
    assert load_head(str(models.DRAFT), target) is None
    single = save_eagle(tmp_path)
    weights = torch.load(single / "pytorch_model.bin")
    torch.save({name: tensor for name, tensor in weights.items() if name != "fc.weight"}, single / "pytorch_model.bin")
    assert load_head(str(single), target) is None  # a model of one layer


def test_eagle_in_both_file_formats(target: ModelRunner, tmp_path: Path) -> None:
    folder = save_eagle(tmp_path)
    found = load_head(str(folder), target, pack=False)
    assert found is not None and isinstance(found.head, EagleHead)
    weights = torch.load(folder / "pytorch_model.bin")
    assert torch.equal(found.head.fc.bias, weights["fc.bias"])
    (folder / "pytorch_model.bin").unlink()
    save_file(weights | {"embed_tokens.weight": torch.zeros(97, 32)}, folder / "model.safetensors")
    again = load_head(str(folder), target, pack=False)
    assert again is not None and isinstance(again.head, EagleHead)
    assert torch.equal(again.head.fc.weight, found.head.fc.weight)


def test_eagle_3_has_its_own_vocabulary_and_reads_three_layers(target: ModelRunner, tmp_path: Path) -> None:
    found = load_head(str(save_eagle3(tmp_path)), target)
    assert found is not None and isinstance(found.head, Eagle3Head)
    assert found.head.layers_read == (2, 3, 3)
    logits = found.head.logits(torch.randn(1, 2, 32), torch.nn.Identity())
    assert logits.shape == (1, 2, 97)
    ids = torch.arange(DRAFT_VOCABULARY)
    assert torch.equal(logits[0, 0].isfinite().nonzero()[:, 0], ids + ids // 2)
    named = save_eagle3(tmp_path / "named", eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 4, 5]})
    other = load_head(str(named), target)
    assert other is not None and other.head.layers_read == (0, 4, 5)


class Unsafe:
    """An object whose loading would run code."""


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe", "deepseek_v3"])
def test_mtp_layers_are_in_the_targets_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    if family == "deepseek_v3":
        from transformers import DeepseekV3ForCausalLM

        # The class names the layer of the published size, which has 61 others.
        monkeypatch.setattr(DeepseekV3ForCausalLM, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.4.*"])
    _, head = load_pair(tmp_path, "mtp", family)
    assert isinstance(head.head, MtpHead)


def test_an_mtp_layer_comes_from_the_targets_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache_models(monkeypatch, tmp_path / "hub", {"v2": save_target(tmp_path / "target", "qwen3_5")})
    target = load_weights(LoadOptions(MODEL, "v2", dtype="float32", device="cpu"))
    head = load_head("mtp", target, "v2")
    assert head is not None and isinstance(head.head, MtpHead)
    assert isinstance(target, TorchRunner) and target.model.config.name_or_path == MODEL


def test_what_cannot_be_loaded_is_named(target: ModelRunner, tmp_path: Path) -> None:
    def refuse(folder: Path, **config: object) -> str:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | config))
        with pytest.raises(ModelError) as refused:
            load_head(str(folder), target)
        return str(refused.value)

    assert "are Medusa's, which are not supported" in refuse(save_eagle(tmp_path / "other"), medusa_num_heads=4)
    unsafe = save_eagle(tmp_path / "unsafe")
    torch.save({"fc.weight": Unsafe()}, unsafe / "pytorch_model.bin")
    assert "cannot be loaded (UnpicklingError" in refuse(unsafe)
    assert "several layers" in refuse(save_eagle3(tmp_path / "deep"), num_hidden_layers=2)
    assert "layers that the target does not have" in refuse(
        save_eagle3(tmp_path / "layers"), eagle_aux_hidden_state_layer_ids=[0, 4, 9]
    )
    folder = save_eagle(tmp_path / "parts")
    weights = torch.load(folder / "pytorch_model.bin")
    del weights["layers.0.mlp.up_proj.weight"]
    torch.save(weights, folder / "pytorch_model.bin")
    assert "layers.0.mlp.up_proj.weight is missing" in refuse(folder)
    torch.save(weights | {"fc.weight": torch.zeros(48, 96)}, folder / "pytorch_model.bin")
    assert "reads 96 values per token, and this target gives 2 times 32" in refuse(folder)
    (folder / "pytorch_model.bin").write_text("version https://git-lfs.github.com/spec/v1")
    assert "cannot be loaded" in refuse(folder)
    (folder / "pytorch_model.bin").unlink()
    assert load_head(str(folder), target) is None  # a model of one layer, in several files
    assert "There are no weights" in refuse(folder, architectures=["EagleLlamaForCausalLM"])
    folder = save_eagle3(tmp_path / "ids")
    weights = torch.load(folder / "pytorch_model.bin")
    torch.save(weights | {"d2t": weights["d2t"] - 500}, folder / "pytorch_model.bin")
    assert "drafts tokens that the target does not have" in refuse(folder)
    with pytest.raises(ModelError, match="No multi-token prediction layer"):
        load_head("mtp", target)


def test_a_target_without_hidden_states_is_refused() -> None:
    target = cast(ModelRunner, object())
    with pytest.raises(ModelError, match=r"reads hidden states, which llama\.cpp does not give; use a draft model"):
        load_head(MTP, target)
