"""The kernel of linear layers against PyTorch's products, on a GPU if there is one, else in Triton's interpreter."""

from itertools import product

import pytest
import torch

from outrider.verify.model.gpu import triton_products
from outrider.verify.model.gpu.projections import use_kernels
from outrider.verify.model.gpu.text_work import ROWS
from outrider.verify.model.gpu.triton_products import Gpu, KernelLinear, Tile, splits_of, use_kernel
from tests.verify.model.families import build
from tests.verify.model.gpu.conftest import DEVICE

A100, H100, ADA = Gpu(108, 162 << 10, 80), Gpu(132, 226 << 10, 90), Gpu(128, 98 << 10, 89)


def layer(inputs: int, outputs: int, bias: bool = False, dtype: torch.dtype = torch.bfloat16) -> KernelLinear:
    torch.manual_seed(inputs)
    found = torch.nn.Linear(inputs, outputs, bias, DEVICE, dtype)
    use_kernel([found])
    assert isinstance(found, KernelLinear)
    return found


@pytest.mark.parametrize(
    ("inputs", "outputs", "bias", "dtype", "splits"),
    [
        (64, 6200, False, torch.bfloat16, 1),
        (304, 3300, True, torch.float16, 2),  # neither whole blocks of inputs nor whole tiles of outputs
        (640, 1, True, torch.bfloat16, 4),  # five blocks, so the last split is empty
        (768, 1, True, torch.bfloat16, 4),  # six blocks, which three splits have
    ],
)
def test_products_are_pytorchs(inputs: int, outputs: int, bias: bool, dtype: torch.dtype, splits: int) -> None:
    linear = layer(inputs, outputs, bias, dtype)
    assert splits_of(inputs, outputs) == splits
    weight, added = linear.weight.double(), 0 if not bias else linear.bias.double()
    for rows in (1, 20, 72):
        given = torch.randn(1, rows, inputs, device=DEVICE).to(dtype)
        found, expected = linear(given), given.double() @ weight.T + added
        assert found.shape == (1, rows, outputs) and found.dtype == dtype
        assert (found - expected).norm() < 1e-2 * expected.norm()


@pytest.mark.parametrize(("inputs", "outputs"), [(320, 400), pytest.param(64, 17_000, marks=pytest.mark.slow)])
def test_a_row_has_the_same_bits_in_any_number_of_rows(inputs: int, outputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And in tiles of any size. Half of the inputs cancel the others, so another order of the sums shows."""
    linear = layer(inputs, outputs)
    with torch.no_grad():
        linear.weight[:, inputs // 2 :] = -linear.weight[:, : inputs // 2].flip(1)
        rows = torch.randn(ROWS[-1], inputs // 2, device=DEVICE).bfloat16()
    rows = torch.cat([rows, rows.flip(1)], 1)
    whole = linear(rows)
    for count in (*ROWS[:-1], 3, 20, 200):
        assert torch.equal(linear(rows[:count]), whole[:count]), count
        assert torch.equal(linear(rows[:count].flip(0)), whole[:count].flip(0)), count
    small = triton_products.gpu_of(DEVICE)._replace(multiprocessors=1)
    assert [Tile.of(count, outputs, 1, small).outputs for count in (16, 72, 136)] == [64, 64, 128]
    monkeypatch.setattr(triton_products, "gpu_of", lambda _: small)
    for count in (16, 72, 256):
        assert torch.equal(linear(rows[:count]), whole[:count]), count
    assert not linear.arrived.any()


def test_more_rows_than_the_layer_has_counters_for() -> None:
    linear = layer(64, 40)
    given = torch.randn(520, 64, device=DEVICE).bfloat16()
    assert torch.equal(linear(given)[:9], linear(given[:9]))


def test_blocks_fit_the_shared_memory() -> None:
    for gpu, count, outputs, bits, itemsize in product((A100, H100, ADA), ROWS, (4096, 1 << 17), (16, 8, 4), (2, 4)):
        if bits == 16 and itemsize == 4:
            continue  # weights of 32 bits are not the kernel's
        tile = Tile.of(count, outputs, splits_of(4096, outputs), gpu, bits, itemsize)
        size = tile.block_bytes(bits, itemsize)
        assert size * tile.stages(gpu.shared_bytes, size) <= gpu.shared_bytes


def test_which_layers_of_a_model_are_computed_by_it() -> None:
    model = build("qwen2", "eager").bfloat16()
    expected = {name: parameter.clone() for name, parameter in model.named_parameters()}
    model.model.layers[0].mlp.down_proj.float()
    use_kernels(model)
    plain = [module for module in model.modules() if type(module) is torch.nn.Linear]
    assert plain == [model.model.layers[0].mlp.down_proj]
    assert isinstance(model.lm_head, KernelLinear)
    assert torch.equal(
        model.lm_head.weight, expected["lm_head.weight" if "lm_head.weight" in expected else "model.embed_tokens.weight"]
    )
    assert model.lm_head.arrived.numel() >= -(-model.lm_head.out_features // triton_products.OUTPUTS[0])
