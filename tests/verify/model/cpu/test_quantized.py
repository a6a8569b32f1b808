"""Quantised layers are near the linear layer, and give a row the same bits beside any number of others."""

from __future__ import annotations

import pytest
import torch

from verify.errors import ModelError
from verify.model.cpu import quantized
from verify.model.cpu.packing import PackedLayer
from verify.model.cpu.quantized import Int4Linear, Int8Linear, multiply_int4, quantize_groups, quantized_layer

pytestmark = pytest.mark.skipif(not torch.cpu._is_vnni_supported(), reason="the CPU has no VNNI instructions")
DTYPES = (torch.float32, torch.bfloat16)


def linear(inputs: int = 96, outputs: int = 48, bias: bool = True, dtype: torch.dtype = torch.float32) -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(inputs, outputs, bias, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("kind", "tolerance"), [(Int8Linear, 0.02), (Int4Linear, 0.09)])
def test_results_are_near_the_linear_layers(
    kind: type[Int8Linear | Int4Linear], tolerance: float, bias: bool, dtype: torch.dtype
) -> None:
    layer = linear(bias=bias, dtype=dtype)
    rows = torch.randn(1, 7, 96, dtype=dtype)
    with torch.inference_mode():
        given, expected = kind(layer)(rows), layer(rows)
    assert given.dtype == dtype and given.shape == expected.shape
    assert (given - expected).float().norm() < tolerance * expected.float().norm()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [Int8Linear, Int4Linear])
def test_a_row_has_the_same_bits_beside_any_number_of_others(kind: type[Int8Linear | Int4Linear], dtype: torch.dtype) -> None:
    layer = kind(linear(352, 112, dtype=dtype))
    rows = torch.randn(1, 130, 352, dtype=dtype)
    with torch.inference_mode():
        together = layer(rows[:, : min(130, layer.most_rows)])
        assert all(torch.equal(layer(rows[:, :count]), together[:, :count]) for count in range(1, 66))
        assert torch.equal(layer(rows[:, 64:65]), together[:, 64:65])
        assert layer(rows[:, :0]).shape == (1, 0, 112)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("outputs", [128, 112])  # the second is packed in another layout
def test_many_rows_are_near_few(outputs: int, dtype: torch.dtype) -> None:
    layer = Int4Linear(linear(352, outputs, dtype=dtype))
    rows = torch.randn(1, 130, 352, dtype=dtype)
    with torch.inference_mode():
        many, few = layer(rows), torch.cat([layer(each) for each in rows.split(layer.most_rows, 1)], 1)
        scripted = torch.jit.script(multiply_int4)(rows, layer.packed, *layer.constants, layer.bias)
    assert (many - few).float().norm() < 0.01 * few.float().norm()
    assert torch.equal(scripted, many)


def test_eight_bit_sums_are_exact() -> None:
    layer = linear(512, 32, bias=False)
    layer.weight.data = torch.randint(-127, 128, layer.weight.shape).float()
    layer.weight.data[:, 0] = 127
    rows = torch.randint(-127, 128, (1, 9, 512)).float()
    rows[:, :, 0] = 127  # the scales are 1
    with torch.inference_mode():
        assert torch.equal(Int8Linear(layer)(rows), (rows.double() @ layer.weight.double().t()).float())


@pytest.mark.parametrize("kind", [Int8Linear, Int4Linear])
def test_zeros_stay_zeros(kind: type[Int8Linear | Int4Linear]) -> None:
    layer = linear(bias=False)
    layer.weight.data[:16] = 0
    with torch.inference_mode():
        assert not kind(layer)(torch.zeros(1, 2, 96)).any()
        assert kind(layer)(torch.ones(1, 2, 96))[..., :16].abs().max() < 1e-6


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.randn(1, 3, 64)
    for kind in (Int8Linear, Int4Linear):
        monkeypatch.undo()
        whole = kind(linear(64, 192))
        monkeypatch.setattr(quantized, "BLOCK", 64)
        with torch.inference_mode():
            assert torch.equal(kind(linear(64, 192))(rows), whole(rows))


@pytest.mark.parametrize(("inputs", "outputs", "kind"), [(64, 48, Int4Linear), (40, 48, Int8Linear), (64, 33, Int8Linear)])
def test_shapes_that_four_bits_do_not_allow_get_eight(inputs: int, outputs: int, kind: type[PackedLayer]) -> None:
    layer = quantized_layer(linear(inputs, outputs), 4)
    assert type(layer) is kind
    assert layer(torch.zeros(1, 2, inputs)).shape == (1, 2, outputs)


def test_groups_reach_both_ends_of_the_scale() -> None:
    groups = torch.randn(4, 5, 32)
    values, scales, centres = quantize_groups(groups)
    assert values.min() == 0 and values.max() == 15
    restored = (values - 8) * scales[..., None].float() + centres[..., None].float()
    assert (restored - groups).abs().max() < 0.75 * groups.abs().max() / 7.5


def test_weights_take_fewer_bytes() -> None:
    layer = linear(256, 256, dtype=torch.bfloat16)
    sizes = [kind(layer).nbytes for kind in (Int8Linear, Int4Linear)]
    assert sizes[0] == 256 * 256 + 4 * 256
    assert sizes[1] == 256 * 256 // 2 + 2 * 2 * 256 * 256 // 32


def test_a_processor_without_vnni_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    quantized.check_processor()
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
    with pytest.raises(ModelError, match=r"set model\.quantize to none"):
        quantized.check_processor()
