"""Products by our own machine code equal those in float64 up to rounding, with the same bits beside any other rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from llvmlite import binding

from outrider.verify.model.cpu.packing import PackedLinear
from outrider.verify.model.cpu.panel_kernel import Arithmetic, Kernel, expected
from outrider.verify.model.cpu.panels import AVX2, AVX512, MULTIPLY, PanelLinear, fits, in_panels, kernel
from outrider.verify.model.cpu.tile_kernel import configuration, tile_rows

KERNELS = [arithmetic for arithmetic in Arithmetic if kernel(arithmetic) is not None]
ROWS = (1, 2, 3, 10, 11, 12, 17, 33, 300)


def linear(inputs: int, outputs: int, arithmetic: Arithmetic, bias: bool) -> torch.nn.Linear:
    """A random layer of the arithmetic's dtype."""
    torch.manual_seed(0)
    dtype = torch.float32 if arithmetic is Arithmetic.FLOAT32 else torch.bfloat16
    return torch.nn.Linear(inputs, outputs, bias=bias, dtype=dtype)


def exact(layer: torch.nn.Linear, rows: torch.Tensor) -> torch.Tensor:
    """The layer's product in float64."""
    product = rows.double() @ layer.weight.double().T
    return product if layer.bias is None else product + layer.bias.double()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("arithmetic", KERNELS)
@torch.inference_mode()
def test_products_equal_those_of_the_layer(arithmetic: Arithmetic, bias: bool) -> None:
    inputs = 160 if arithmetic is Arithmetic.TILES else 98
    layer = linear(inputs, 96, arithmetic, bias)
    panels = PanelLinear(layer, arithmetic)
    for count in ROWS:
        rows = torch.randn(2, count, inputs, dtype=layer.weight.dtype)
        expected = exact(layer, rows)
        # Rounded once from sums in float32.
        assert torch.allclose(panels(rows).double(), expected, rtol=torch.finfo(rows.dtype).eps, atol=1e-4)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("arithmetic", KERNELS)
@torch.inference_mode()
def test_products_equal_those_of_the_loop(arithmetic: Arithmetic, bias: bool) -> None:
    """Bit for bit. Where the CPU adds several products at a time, within the rounding of sums in any order."""
    generator = torch.Generator().manual_seed(1)

    def values(*shape: int) -> torch.Tensor:
        """Multiples of 2^-16 below 8, so that float64 holds a product and its sum exactly."""
        return (torch.randint(-(2**19), 2**19, shape, generator=generator) / 2**16).to(layer.weight.dtype)

    layer, counts = linear(160, 96, arithmetic, bias), (1, 5, 13)
    layer.weight.copy_(values(96, 160))
    if bias:
        layer.bias.copy_(values(96))
    panels, weights = PanelLinear(layer, arithmetic), layer.weight.float().numpy()
    for count in counts:
        rows = values(1, count, 160)
        found, floats = panels(rows)[0], rows[0].float().numpy()
        sums = torch.from_numpy(expected(weights, floats, layer.bias.float().numpy() if bias else None))
        if arithmetic in (Arithmetic.PAIRS, Arithmetic.TILES):
            allowed = 160 * 2.0**-24 * torch.from_numpy(np.abs(floats) @ np.abs(weights.T)) + 2.0**-8 * sums.abs()
            assert ((found.float() - sums).abs() <= allowed).all()
        else:
            assert torch.equal(found, sums.to(layer.weight.dtype))


@pytest.mark.parametrize("arithmetic", KERNELS)
@torch.inference_mode()
def test_a_row_has_the_same_bits_beside_any_others(arithmetic: Arithmetic) -> None:
    layer = linear(256, 64, arithmetic, True)
    panels, rows = PanelLinear(layer, arithmetic), torch.randn(1, 40, 256, dtype=layer.weight.dtype)
    alone = torch.cat([panels(rows[:, row : row + 1]) for row in range(40)], 1)
    for count in range(1, 41):
        assert torch.equal(panels(rows[:, :count]), alone[:, :count])
    assert torch.equal(panels(rows.flip(1)).flip(1), alone)


@pytest.mark.parametrize("arithmetic", KERNELS)
@torch.inference_mode()
def test_threads_change_no_bit(arithmetic: Arithmetic) -> None:
    layer = linear(64, 480, arithmetic, False)
    panels, rows, threads = (
        PanelLinear(layer, arithmetic),
        torch.randn(1, 5, 64, dtype=layer.weight.dtype),
        torch.get_num_threads(),
    )
    try:
        found = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(panels(rows))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("arithmetic", KERNELS)
@torch.inference_mode()
def test_a_script_frees_no_tensor_before_it_is_read(arithmetic: Arithmetic) -> None:
    """A script hands its last reference to a tensor to the operator."""
    layer = linear(64, 64, arithmetic, False)
    panels, script = PanelLinear(layer, arithmetic), torch.jit.script(MULTIPLY[arithmetic])
    for _ in range(20):
        rows = torch.randn(1, 7, 64, dtype=layer.weight.dtype)
        assert torch.equal(script(rows, panels.packed, None), panels(rows))


@pytest.mark.parametrize("arithmetic", KERNELS)
@torch.inference_mode()
def test_values_that_are_not_numbers_stay_so(arithmetic: Arithmetic) -> None:
    layer = linear(32, 64, arithmetic, False)
    rows = torch.ones(1, 3, 32, dtype=layer.weight.dtype)
    rows[0, 1, 5], rows[0, 2, 5] = torch.nan, torch.inf
    found = PanelLinear(layer, arithmetic)(rows)[0]
    assert found[0].isfinite().all()
    assert found[1].isnan().all()
    assert found[2].isinf().all()


@torch.inference_mode()
def test_rows_of_another_width_are_refused() -> None:
    layer = linear(32, 64, Arithmetic.FLOAT32, False)
    with pytest.raises(AssertionError, match="same number of inputs"):
        PanelLinear(layer, Arithmetic.FLOAT32)(torch.ones(1, 3, 34))


def test_no_rows_give_no_outputs() -> None:
    layer = linear(32, 64, Arithmetic.FLOAT32, False)
    with torch.inference_mode():
        assert PanelLinear(layer, Arithmetic.FLOAT32)(torch.ones(1, 0, 32)).shape == (1, 0, 64)


def test_layers_whose_outputs_fill_no_panels_do_not_fit() -> None:
    assert fits(linear(32, 64, Arithmetic.FLOAT32, False), Arithmetic.FLOAT32)
    assert not fits(linear(32, 65, Arithmetic.FLOAT32, False), Arithmetic.FLOAT32)
    assert not fits(linear(33, 64, Arithmetic.FLOAT32, False), Arithmetic.FLOAT32)


@pytest.mark.parametrize("size", [AVX2, AVX512])
@pytest.mark.parametrize("arithmetic", [Arithmetic.FLOAT32, Arithmetic.WIDENED])
@torch.inference_mode()
def test_kernels_for_other_vectors(arithmetic: Arithmetic, size: tuple[int, int]) -> None:
    """LLVM splits vectors that the CPU does not have."""
    found, name = Kernel(arithmetic, *size), f"test_{arithmetic}_{size[0]}"
    if not hasattr(torch.ops.outrider, name):
        found.register(name)
    layer = linear(48, 64, arithmetic, False)
    for count in (1, 4, 5, 6, 11, 12, 23):
        rows = torch.randn(count, 48, dtype=layer.weight.dtype)
        out = torch.empty(count, 64, dtype=layer.weight.dtype)
        added = torch.empty(0, dtype=layer.weight.dtype)
        getattr(torch.ops.outrider, name)(in_panels(layer.weight, found), rows.float(), added, out, count, 48, 64)
        assert torch.allclose(out.double(), exact(layer, rows), rtol=torch.finfo(out.dtype).eps, atol=1e-4)


def test_products_of_bfloat16_need_the_instruction() -> None:
    features = binding.get_host_cpu_features()
    assert (Arithmetic.PAIRS in KERNELS) == bool(features.get("avx512bf16"))
    assert (Arithmetic.TILES in KERNELS) == bool(features.get("amx-bf16"))


def test_tiles_have_the_rows_of_their_block() -> None:
    assert [tile_rows(rows) for rows in (1, 16, 17, 32)] == [[1], [16], [16, 1], [16, 16]]
    for rows in (5, 20):
        palette, widths, heights = configuration(rows)[:16], configuration(rows)[16:48], configuration(rows)[48:]
        assert palette == bytes([1, *[0] * 15])
        below = rows - 16 if rows > 16 else 0
        assert list(heights[:8]) == [min(16, rows)] * 2 + [below] * 2 + [min(16, rows), below, 16, 16]
        assert [int.from_bytes(widths[place : place + 2], "little") for place in range(0, 16, 2)] == [
            64 if height else 0 for height in heights[:8]
        ]


def test_a_thread_that_multiplied_tiles_can_use_torchs_own() -> None:
    """Tile registers are configured for each product, so neither disturbs the other."""
    if Arithmetic.TILES not in KERNELS:
        pytest.skip("without AMX")
    layer = linear(256, 64, Arithmetic.TILES, False)
    ours, others = PanelLinear(layer, Arithmetic.TILES), PackedLinear(layer)
    rows = torch.randn(1, 40, 256, dtype=torch.bfloat16)
    states = torch.randn(1, 4, 100, 64, dtype=torch.bfloat16)
    with torch.inference_mode():
        expected = others(rows), torch.nn.functional.scaled_dot_product_attention(states, states, states), ours(rows[:, :5])
        for _ in range(20):
            assert torch.equal(ours(rows[:, :5]), expected[2])
            assert torch.equal(torch.nn.functional.scaled_dot_product_attention(states, states, states), expected[1])
            assert torch.equal(others(rows), expected[0])
