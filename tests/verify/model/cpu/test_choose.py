"""A model's linear layers are replaced by the fastest of this machine."""

from __future__ import annotations

import runpy
import time
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.verify.model.attention import dot_product
from outrider.verify.model.attention.interface import NAME
from outrider.verify.model.batch import ForwardBatch
from outrider.verify.model.cpu import choose
from outrider.verify.model.cpu.choose import ARITHMETIC, ONEDNN, can_pack, chosen, fastest, mean_times, pack_layers
from outrider.verify.model.cpu.packing import PackedLinear
from outrider.verify.model.cpu.panel_kernel import Arithmetic
from outrider.verify.model.cpu.panels import PanelLinear, kernel
from outrider.verify.model.packed import PackedLayer
from outrider.verify.model.private_torch import multiplies_bfloat16
from outrider.verify.model.torch_runner import TorchRunner
from tests.verify.model.test_architectures import make


@pytest.mark.parametrize("choice", [Arithmetic.FLOAT32, None])
def test_only_plain_linear_layers_are_packed(monkeypatch: pytest.MonkeyPatch, choice: Arithmetic | None) -> None:
    class Other(torch.nn.Linear):
        pass

    monkeypatch.setattr(choose, "fastest", lambda dtype, threads: choice)
    inner = torch.nn.Sequential(torch.nn.Linear(4, 4))
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), inner, Other(4, 4), torch.nn.ReLU())
    assert can_pack(model)
    pack_layers(model)
    first = PanelLinear if choice and kernel(choice) else PackedLinear
    assert [type(module) for module in model] == [first, torch.nn.Sequential, Other, torch.nn.ReLU]
    assert type(inner[0]) is PackedLinear  # four outputs fill no panel


def test_a_packed_model_can_get_another_runner(tiny_config: LlamaConfig) -> None:
    torch.manual_seed(0)
    first = TorchRunner(LlamaForCausalLM(tiny_config), pack=True)
    again = TorchRunner(first.model, 64, pack=True)
    assert again.weight_bytes == first.weight_bytes
    batch = ForwardBatch.chain(torch.arange(5))
    assert torch.equal(again.forward(again.new_cache(), batch), first.forward(first.new_cache(), batch))


def test_half_precision_is_not_packed() -> None:
    assert not can_pack(torch.nn.Linear(4, 4).half())


@pytest.mark.parametrize("slow", [0, 1, 2])
def test_the_fastest_arithmetic_is_chosen(monkeypatch: pytest.MonkeyPatch, slow: int) -> None:
    """oneDNN, which is first, must be faster by a margin."""
    monkeypatch.setattr(choose, "mean_times", lambda layers, dtype: [1.0 + (slow == place) for place in range(len(layers))])
    present = [each for each in ARITHMETIC[torch.bfloat16] if kernel(each)]
    expected = next((each for place, each in enumerate(present, start=1) if place != slow), None)
    assert fastest.__wrapped__(torch.bfloat16, 1) == expected


@pytest.mark.parametrize("choice", [Arithmetic.FLOAT32, None])
def test_a_choice_is_timed_once_and_stored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, choice: Arithmetic | None) -> None:
    if choice and not kernel(choice):
        pytest.skip("this CPU has no such kernel")
    folder = tmp_path / "findings"
    with monkeypatch.context() as patched:
        patched.setattr(choose, "fastest", lambda dtype, threads: choice)
        assert chosen(torch.float32, folder) == choice
    with monkeypatch.context() as patched:
        patched.setattr(choose, "fastest", lambda dtype, threads: pytest.fail("timed again"))
        assert chosen(torch.float32, folder) == choice


@pytest.mark.parametrize("text", ["", "[]", "null", "{}", '{"choice": "tea"}', '{"choice": ["float32"]}', "[" * 100_000])
def test_a_stored_choice_that_is_damaged_or_not_possible_here_is_made_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str
) -> None:
    monkeypatch.setattr(choose, "fastest", lambda dtype, threads: None)
    assert chosen(torch.float32, tmp_path) is None
    (file,) = tmp_path.iterdir()
    intact = file.read_text()
    file.write_text(text)
    assert chosen(torch.float32, tmp_path) is None
    assert file.read_text() == intact
    assert ONEDNN in intact
    if kernel(Arithmetic.FLOAT32):
        file.write_text(intact.replace(ONEDNN, Arithmetic.FLOAT32))
        assert chosen(torch.float32, tmp_path) is Arithmetic.FLOAT32
        monkeypatch.setattr(choose, "kernel", lambda arithmetic: None)
        assert chosen(torch.float32, tmp_path) is None


def test_a_runner_stores_its_choice_and_names_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(choose, "fastest", lambda dtype, threads: None)
    found = TorchRunner(make("phi3", NAME), pack=True, started=False, findings=tmp_path)
    assert found.kernels == "linear layers: oneDNN; attention: PyTorch"
    assert len(list(tmp_path.iterdir())) == 1


def test_choices_differ_by_dtype_and_threads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(choose, "fastest", lambda dtype, threads: None)
    for dtype in ARITHMETIC:
        for threads in (1, 2):
            monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
            chosen(dtype, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2 * len(ARITHMETIC)


def test_nothing_is_timed_at_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "perf_counter", lambda: pytest.fail("timed"))
    for module in (choose, dot_product):
        runpy.run_path(str(module.__file__))


def test_products_of_all_sizes_are_timed() -> None:
    counts = []

    class Counting(torch.nn.Module):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            counts.append(rows.size(1))
            return rows

    times = mean_times([Counting(), Counting()], torch.float32)
    assert len(times) == 2
    assert min(times) > 0
    assert sorted(set(counts)) == list(choose.ROWS)


def test_packed_layers_replace_those_of_every_dtype() -> None:
    for dtype in ARITHMETIC:
        model = torch.nn.Sequential(torch.nn.Linear(64, 64, dtype=dtype))
        pack_layers(model)
        assert isinstance(model[0], PackedLayer) or not multiplies_bfloat16()
