"""Linear layers by the kernel, with weights of 16, 8 and 4 bits, and merged: on a GPU, or in Triton's interpreter."""

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from outrider.verify.model.attention.interface import NAME
from outrider.verify.model.batch import ForwardBatch
from outrider.verify.model.cpu.native.library import Engine, compiled_library
from outrider.verify.model.cpu.native.weights import Kind, Weights
from outrider.verify.model.gpu import triton_products
from outrider.verify.model.gpu.projections import MergedLinear, MergedPart, joined, merge_projections, use_kernels
from outrider.verify.model.gpu.quantized import Blocks, quantized
from outrider.verify.model.gpu.text_work import ROWS
from outrider.verify.model.gpu.tiles import OUTPUTS, ROOMY, Gpu, Product, Tile, Tuning, gpu_of
from outrider.verify.model.gpu.triton_products import KernelLinear, splits_of, use_kernel
from outrider.verify.model.torch_runner import TorchRunner
from tests.slow import mostly_slow
from tests.verify.model.families import ATTENDING, build
from tests.verify.model.gpu.conftest import DEVICE

# Numbers of rows: on a GPU, all that are captured; the interpreter takes seconds for a hundred.
EACH_COUNT = pytest.mark.parametrize(
    "counts", [(1, 20, 72, 136), pytest.param((*ROWS[:-1], 3, 20, 200), marks=pytest.mark.slow)], ids=["some", "all"]
)
A100, H100, ADA = Gpu(108, 162 << 10, 80), Gpu(132, 226 << 10, 90), Gpu(128, 98 << 10, 89)


def layer(inputs: int, outputs: int, bias: bool = False, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Linear:
    torch.manual_seed(inputs)
    return torch.nn.Linear(inputs, outputs, bias, DEVICE, dtype).requires_grad_(False)


def computed(linear: torch.nn.Linear, bits: int = 16) -> Any:
    """The layer with weights of these bits, by the kernel."""
    if bits < 16:
        return quantized(linear, bits, DEVICE)
    use_kernel([linear])
    return linear


@pytest.mark.parametrize(
    ("inputs", "outputs", "bias", "dtype", "splits"),
    [
        pytest.param(64, 6200, False, torch.bfloat16, 1, marks=pytest.mark.slow),
        (304, 3300, True, torch.float16, 2),  # neither whole blocks of inputs nor whole tiles of outputs
        (640, 1, True, torch.bfloat16, 4),  # five blocks, so the last split is empty
        (768, 1, True, torch.bfloat16, 4),  # six blocks, which three splits have
    ],
)
def test_products_are_pytorchs(inputs: int, outputs: int, bias: bool, dtype: torch.dtype, splits: int) -> None:
    linear = computed(layer(inputs, outputs, bias, dtype))
    assert splits_of(inputs, outputs) == splits
    weight, added = linear.weight.double(), 0 if not bias else linear.bias.double()
    for rows in (1, 72):
        given = torch.randn(1, rows, inputs, device=DEVICE).to(dtype)
        found, expected = linear(given), given.double() @ weight.T + added
        assert found.shape == (1, rows, outputs) and found.dtype == dtype
        assert (found - expected).norm() < 1e-2 * expected.norm()


@EACH_COUNT
@pytest.mark.parametrize(
    ("inputs", "outputs", "bits"),
    mostly_slow([(320, 400, 16), (320, 400, 8), (320, 400, 4), (64, 17_000, 16)], (320, 400, 16), (320, 400, 4)),
)
def test_a_row_has_the_same_bits_in_any_number_of_rows(
    inputs: int, outputs: int, bits: int, counts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And in tiles of any size. Half of the inputs cancel the others, so another order of the sums shows."""
    given, half = layer(inputs, outputs), torch.randn(ROWS[-1], inputs // 2, device=DEVICE).bfloat16()
    given.weight[:, inputs // 2 :] = -given.weight[:, : inputs // 2].flip(1)
    linear, rows = computed(given, bits), torch.cat([half, half.flip(1)], 1)
    whole = linear(rows)
    for count in counts:
        assert torch.equal(linear(rows[:count].flip(0)), whole[:count].flip(0)), count
    small = gpu_of(DEVICE)._replace(multiprocessors=1)
    assert [Tile.of(count, outputs, 1, small).outputs for count in (16, 72, 136)] == [64, 64, 128]
    monkeypatch.setattr(triton_products, "gpu_of", lambda _: small)
    for count in (16, 72, 256):
        assert torch.equal(linear(rows[:count]), whole[:count]), count
    rows[1::2] = torch.nan
    assert torch.equal(linear(rows)[::2], whole[::2])  # nothing of a neighbour is read
    assert not linear.arrived.any()


@pytest.mark.parametrize("bits", mostly_slow([16, 4], 4))
def test_tiles_that_may_be_the_fastest_give_the_same_bits(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    linear, gpu = computed(layer(320, 400), bits), gpu_of(DEVICE)
    for rows in (torch.randn(count, 320, device=DEVICE).bfloat16() for count in (3, 72)):
        whole, others = linear(rows), Tile.of(len(rows), 400, 1, gpu, bits).others(gpu, bits, 2)
        assert {(each.outputs, each.blocks) for each in others} == {(64, 3), (64, 4), (128, 3), (128, 4)}
        for tile in others:
            monkeypatch.setattr(Tuning, "tile", lambda *_, tile=tile: tile)
            assert torch.equal(linear(rows), whole), tile
        monkeypatch.undo()


def test_the_fastest_tiles_are_kept(tmp_path: Path) -> None:
    """And each is timed on the calls that the model makes; a later start times what the file has not."""
    file = tmp_path / "tiles.json"
    rule, used = Tile.of(3, 40, 1, gpu_of(DEVICE)), list[Tile]()
    product = Product(64, 40, 16, 32, rule.rows, rule.more_rows, 0, False)
    tiles = [rule, rule._replace(outputs=128), rule._replace(outputs=256)]
    times = iter((3.0, 1.0, 2.0))

    def seconds(work: Any) -> float:
        work()
        return next(times)

    for timed in (Tuning(), Tuning()):
        with timed.timed(seconds, file):
            for _ in range(2):
                timed.note(product, tiles, used.append)
            assert used[:3] == tiles  # are compiled with the other kernels
        assert timed.tile(product, rule) == tiles[1]
        assert len(used) == 3 + 2 * 3  # which are timed in two calls


def test_more_rows_than_the_layer_has_counters_for() -> None:
    linear = computed(layer(64, 40))
    given = torch.randn(520, 64, device=DEVICE).bfloat16()
    assert torch.equal(linear(given)[:9], linear(given[:9]))


def test_blocks_fit_the_shared_memory() -> None:
    for gpu, count, outputs, bits, itemsize in product((A100, H100, ADA), ROWS, (4096, 1 << 17), (16, 8, 4), (2, 4)):
        if bits == 16 and itemsize == 4:
            continue  # weights of 32 bits are not the kernel's
        tile = Tile.of(count, outputs, splits_of(4096, outputs), gpu, bits, itemsize)
        size = tile.block_bytes(bits, itemsize)
        in_registers = gpu.capability not in ROOMY  # where tensor cores have one of the blocks
        assert size * (tile.stages(gpu.shared_bytes, size) - in_registers) <= gpu.shared_bytes


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
    assert model.lm_head.arrived.numel() >= -(-model.lm_head.out_features // OUTPUTS[0])


KINDS = {8: Kind.INT8, 4: Kind.INT4}


@pytest.mark.parametrize("bits", KINDS)
@pytest.mark.skipif(compiled_library() is None, reason="the library was not compiled")
def test_the_weights_are_those_of_a_cpu(bits: int) -> None:
    torch.manual_seed(bits)
    weight = torch.randn(70, 160) * torch.rand(70, 160)
    weight[3, :32], weight[4, 32:64] = 0.0, 0.25
    expected = torch.from_numpy(Weights.of(Engine.shared(), KINDS[bits], weight.numpy()).unpack(np.arange(70)))
    found = Blocks.of(weight, bits).weights()
    assert found.shape == weight.shape
    equal = (found == expected).double().mean()
    assert equal == 1 if bits == 8 else equal > 0.99  # of 4 bits, two ranges may have errors that differ by rounding alone
    assert (found - weight).norm() < 1.01 * (expected - weight).norm()


def logits_of(runner: TorchRunner) -> torch.Tensor:
    found: torch.Tensor = runner.forward(runner.new_cache(), ForwardBatch.chain(range(3, 15)))
    return found.clone()


@pytest.mark.parametrize("name", ATTENDING)
def test_logits_are_those_of_the_layers_one_by_one(name: str) -> None:
    model = build(name, NAME)
    expected = logits_of(TorchRunner(model))
    merge_projections(model)
    assert torch.allclose(logits_of(TorchRunner(model)), expected, atol=1e-4)


def test_layers_that_differ_stay_apart() -> None:
    model = build("llama", NAME)
    attention = model.model.layers[0].self_attn
    attention.k_proj = torch.nn.Linear(16, 16, bias=False)
    model.model.layers[1].mlp.up_proj.weight.data = model.model.layers[1].mlp.up_proj.weight.data.bfloat16()
    merge_projections(model)
    assert type(attention.q_proj) is torch.nn.Linear and type(model.model.layers[1].mlp.gate_proj) is torch.nn.Linear


def test_a_part_of_other_rows_is_of_another_product() -> None:
    first, second = torch.nn.Linear(8, 4), torch.nn.Linear(8, 6)
    product = joined([first, second], False)
    assert product is not None
    merged = MergedLinear(product, [4, 6])
    part, rows, others = MergedPart(merged, 1), torch.randn(3, 8), torch.randn(3, 8)
    for found, layer, given in ((part, second, others), (merged, first, rows), (part, second, others), (part, second, rows)):
        assert torch.allclose(found(given), layer(given), atol=1e-6)
    assert merged.rows is None and not merged.parts  # nothing keeps their memory


def test_a_compiled_layer_has_one_product_for_each_group() -> None:
    """Without a break: what one layer keeps for the next is seen by the compiler."""
    model = build("llama", NAME)
    attention = model.model.layers[0].self_attn
    merge_projections(model)
    seen: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        seen.append(sum(node.target is torch._C._nn.linear for node in graph.graph.nodes))
        return graph.forward

    def projections(rows: torch.Tensor) -> torch.Tensor:
        return torch.cat([attention.q_proj(rows), attention.k_proj(rows), attention.v_proj(rows)], -1)

    rows = torch.randn(2, 32)
    expected = projections(rows)
    assert torch.equal(torch.compile(projections, backend=backend, fullgraph=True)(rows), expected)
    assert seen == [1]
