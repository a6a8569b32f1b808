"""A load on a GPU, which is emulated here: what reads the weights, and what rounds, keeps and splits them."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.verify.checkpoint import locate
from outrider.verify.model import early_kernels, loading
from outrider.verify.model.cpu.native import packed_file
from outrider.verify.model.gpu.quantized import BlockLinear
from outrider.verify.model.gpu.split_linear import SplitLinear
from outrider.verify.model.load_options import LoadOptions
from outrider.verify.model.sizes import packed_layers
from outrider.verify.model.torch_runner import TorchRunner
from tests.verify.model import families
from tests.verify.model.cpu.native.files import write_gguf
from tests.verify.model.cpu.native.models import build
from tests.verify.model.cpu.native.test_packed_file import wait_written
from tests.verify.model.gpu.emulated_devices import Devices
from tests.verify.model.gpu.test_devices import FIRST, SECOND
from tests.verify.model.gpu.test_ranks import SIZES
from tests.verify.model.picture_models import FAMILIES as PICTURES


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "on_gpu", lambda _: True)
    monkeypatch.setattr(early_kernels, "compiled_beside", lambda *_: nullcontext())
    monkeypatch.setattr(LoadOptions, "pack", False)
    monkeypatch.setattr(packed_file, "LEAST_BYTES", 0)


def loaded(path: Path, **options: object) -> TorchRunner:
    found = loading.load(LoadOptions(str(path), **options), locate(str(path)))  # type: ignore[arg-type]
    assert isinstance(found, TorchRunner)
    wait_written()
    return found


@pytest.mark.parametrize("name", ["gpt_neox", "smolvlm"])
def test_transformers_reads_once_what_is_rounded(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = families.build(name, "eager") if name in families.FAMILIES else PICTURES[name].model()
    model.save_pretrained(folder := tmp_path / "model")
    options = {"device": "cpu", "quantize": "int8", "packed_folder": tmp_path / "packed"}
    first = loaded(folder, **options)
    assert all(isinstance(each, BlockLinear) for each in packed_layers(first.model)) and packed_layers(first.model)
    monkeypatch.setattr(loading, "read_model", lambda *_: pytest.fail("read again"))
    found = loaded(folder, **options)
    for name, each in first.model.state_dict().items():
        assert torch.equal(each, found.model.state_dict()[name]), name
    assert found.stop_tokens == first.stop_tokens


@pytest.mark.parametrize("kind", ["a checkpoint", "a file", "rounded"])
def test_layers_are_split_as_they_are_read(
    kind: str, devices: Devices, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: dict[str, Any] = SIZES
    model = build("qwen3", **sizes).bfloat16()
    if kind == "a file":
        path = write_gguf(model, tmp_path / "model.gguf")
    else:
        model.save_pretrained(path := tmp_path / "model")
    monkeypatch.setattr(loading, "resolve_devices", lambda _: (FIRST, SECOND))
    found = loaded(path, device="cpu:0+cpu:1", dtype="bfloat16", quantize="int4" if kind == "rounded" else "none")
    assert found.is_split
    layers = [each for each in found.model.modules() if isinstance(each, SplitLinear)]
    assert len(layers) == 4 * found.model.config.num_hidden_layers + 1
    for layer in layers:
        assert layer.devices == [FIRST, SECOND]
        assert all(isinstance(part, BlockLinear) == (kind == "rounded") for part in layer.parts)
