"""Unpacked weights are those of the kernel for 4 bits; many rows are multiplied with them, a few outputs at a time."""

from __future__ import annotations

import pytest
import torch

from verify.model.cpu import unpacking
from verify.model.cpu.unpacking import GROUP, multiply_unpacked, packed_width, unpack

pytestmark = pytest.mark.skipif(not torch.cpu._is_vnni_supported(), reason="the CPU has no VNNI instructions")
INPUTS, OUTPUTS, ROWS = 96, 256, 70


def weights() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values 0 to 15 [outputs, inputs], the same packed, and scales."""
    torch.manual_seed(0)
    values = torch.randint(0, 16, (OUTPUTS, INPUTS), dtype=torch.int32)
    scales = torch.randn(INPUTS // GROUP, OUTPUTS, 2).bfloat16()
    return values, torch.ops.aten._convert_weight_to_int4pack_for_cpu(values, 1), scales


def test_unpacked_weights_are_the_values_scaled() -> None:
    width = packed_width()
    assert width is not None, "the layout of this CPU's kernel is unknown"
    values, packed, scales = weights()
    groups = (values.float() - 8).t().unflatten(0, (-1, GROUP)) * scales[:, None, :, 0].float() + scales[:, None, :, 1].float()
    expected = groups.flatten(0, 1).bfloat16()
    assert torch.equal(unpack(packed, scales, 0, OUTPUTS, width), expected)
    assert torch.equal(unpack(packed, scales, width, 2 * width, width), expected[:, width : 2 * width])


def test_the_number_of_threads_changes_nothing() -> None:
    _, packed, scales = weights()
    width, threads = packed_width() or 0, torch.get_num_threads()
    whole = unpack(packed, scales, 0, OUTPUTS, width)
    try:
        torch.set_num_threads(3)
        assert torch.equal(unpack(packed, scales, 0, OUTPUTS, width), whole)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("at_once", [1, INPUTS * 128, 1 << 21])
def test_products_are_those_of_the_unpacked_weights(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpacking, "UNPACKED_VALUES", at_once)
    _, packed, scales = weights()
    rows = torch.randn(ROWS, INPUTS).bfloat16()
    with torch.inference_mode():
        expected = rows.float() @ unpack(packed, scales, 0, OUTPUTS, packed_width() or 0).float()
        assert (multiply_unpacked(rows, packed, scales) - expected).abs().max() < 0.01 * expected.abs().max()


def test_an_unknown_layout_is_left_to_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    _, packed, scales = weights()
    rows = torch.randn(ROWS, INPUTS).bfloat16()
    monkeypatch.setattr(unpacking, "packed_width", lambda: None)
    kernel = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, packed, GROUP, scales)
    assert torch.equal(multiply_unpacked(rows, packed, scales), kernel)


def test_a_layout_that_does_not_give_the_kernels_weights_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpacking, "unpack", lambda *arguments: unpack(*arguments).roll(1, 0))
    packed_width.cache_clear()
    try:
        assert packed_width() is None
    finally:
        packed_width.cache_clear()
