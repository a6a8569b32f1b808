"""The kernels of mixtures against transformers' experts and routers, on a GPU if there is one, else in Triton's interpreter."""

import copy
import re
from collections.abc import Iterator
from importlib import import_module
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch.nn import functional as F

from outrider.verify.model.gpu.experts import KernelExperts, KernelRouter, form_of, quantize_experts, use_experts, way_of
from outrider.verify.model.gpu.quantized import Blocks
from outrider.verify.model.gpu.text_work import ROWS
from outrider.verify.model.gpu.triton_experts import choose_experts, counters, experts, splits_of, work_of
from outrider.verify.model.sizes import weight_size
from tests.verify.model import families
from tests.verify.model.gpu.conftest import DEVICE

BITS = pytest.mark.parametrize("bits", (16, 8, 4))
EXPERTS, CHOSEN, HIDDEN, WIDTH = 12, 3, 160, 96
ALPHA, LIMIT = 1.702, 7.0


@pytest.fixture(autouse=True)
def fresh_memory_is_no_number() -> Iterator[None]:
    """So that what is read must have been written; integers are the largest ones."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


class Mixture(NamedTuple):
    """Random experts, whose weights are rounded to some number of bits."""

    gate_up: torch.Tensor  # [EXPERTS, 2 * width, hidden], as the kernels see it
    down: torch.Tensor
    biases: list[torch.Tensor]
    packed: tuple[list[torch.Tensor], list[torch.Tensor]]
    way: str
    arrived: torch.Tensor

    @staticmethod
    def of(bits: int, way: str = "silu", hidden: int = HIDDEN, width: int = WIDTH) -> "Mixture":
        torch.manual_seed(bits)
        shapes = (EXPERTS, 2 * width, hidden), (EXPERTS, hidden, width)
        weights = [torch.randn(shape, device=DEVICE).bfloat16() / shape[2] ** 0.5 for shape in shapes]
        packed = [[each.flatten(0, 1)] for each in weights]
        if bits < 16:
            blocks = [Blocks.of(each, bits) for [each] in packed]
            weights = [each.weights().bfloat16().view(shape) for each, shape in zip(blocks, shapes, strict=True)]
            packed = [[part for part in each[1:] if part is not None] for each in blocks]
        biases = [torch.randn(shape[:2], device=DEVICE).bfloat16() for shape in shapes] if way == "clamped" else []
        return Mixture(weights[0], weights[1], biases, (packed[0], packed[1]), way, counters(hidden, DEVICE))

    def __call__(self, rows: torch.Tensor, index: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        is_clamped = self.way == "clamped"
        given = (rows, index, shares, *self.packed, self.biases, self.arrived)
        return experts(*given, self.way, is_clamped, ALPHA if is_clamped else 1.0, LIMIT if is_clamped else 0.0)  # type: ignore[no-any-return]

    def expected(self, rows: torch.Tensor, index: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """By PyTorch, each row and expert apart."""
        added = [each.double() for each in self.biases] or [torch.zeros(EXPERTS, 1, device=DEVICE)] * 2
        found = torch.zeros(rows.shape, dtype=torch.float64, device=DEVICE)
        for row, number in torch.cartesian_prod(torch.arange(len(rows)), torch.arange(index.shape[1])).tolist():
            expert = int(index[row, number])
            both = self.gate_up[expert].double() @ rows[row].double() + added[0][expert]
            if self.way == "clamped":
                gate, up = both[::2].clamp(max=LIMIT), both[1::2].clamp(-LIMIT, LIMIT) + 1
                joined = gate * torch.sigmoid(ALPHA * gate) * up
            else:
                gate, up = both.chunk(2)
                kinds: dict[str, Any] = {
                    "silu": F.silu,
                    "gelu": F.gelu,
                    "gelu_tanh": lambda given: F.gelu(given, approximate="tanh"),
                }
                joined = kinds[self.way](gate) * up
            found[row] += shares[row, number].double() * (
                self.down[expert].double() @ joined.bfloat16().double() + added[1][expert]
            )
        return found


def choices(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts of rows, of which some are chosen often and some never, and their shares."""
    torch.manual_seed(rows)
    scores = torch.randn(rows, EXPERTS, device=DEVICE) - torch.arange(EXPERTS, device=DEVICE) / 3
    shares, index = scores.softmax(1).topk(CHOSEN)
    return index, shares


@BITS
@pytest.mark.parametrize("way", ["silu", "clamped"])
def test_outputs_are_those_of_each_row_and_expert_apart(bits: int, way: str) -> None:
    mixture = Mixture.of(bits, way)
    for count in (1, 2, 20):
        rows, choice = torch.randn(count, HIDDEN, device=DEVICE).bfloat16(), choices(count)
        found, expected = mixture(rows, *choice), mixture.expected(rows, *choice)
        assert found.dtype == rows.dtype
        tolerance = 1e-2 if DEVICE.type == "cuda" else 3e-2  # the interpreter cuts numbers off where a GPU rounds them
        assert (found - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize("way", ["gelu", "gelu_tanh"])
def test_other_activations(way: str) -> None:
    mixture, rows, choice = Mixture.of(16, way), torch.randn(3, HIDDEN, device=DEVICE).bfloat16(), choices(3)
    expected = mixture.expected(rows, *choice)
    assert (mixture(rows, *choice) - expected).norm() <= 2e-2 * expected.norm()


@pytest.mark.parametrize(
    ("bits", "way"), [(16, "silu"), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((8, "clamped"), (4, "silu")))]
)
def test_a_row_has_the_same_bits_in_any_number_of_rows(bits: int, way: str) -> None:
    """Half of the inputs cancel the others, so another order of the sums shows."""
    mixture, half = Mixture.of(bits, way, 64, 32), torch.randn(ROWS[-1], 32, device=DEVICE).bfloat16()
    mixture.gate_up[..., 32:] = -mixture.gate_up[..., :32].flip(-1)
    rows, (index, shares) = torch.cat([half, half.flip(1)], 1), choices(ROWS[-1])
    whole = mixture(rows, index, shares)
    assert whole.isfinite().all()
    for count in (*ROWS[:-1], 3, 20, 200):
        assert torch.equal(mixture(rows[:count], index[:count], shares[:count]), whole[:count]), count
        turned = [each[:count].flip(0) for each in (rows, index, shares)]
        assert torch.equal(mixture(*turned), whole[:count].flip(0)), count
    assert not mixture.arrived.any()


def test_inputs_of_down_are_split_where_a_row_has_few_programs() -> None:
    assert [splits_of(768, 2048, 8), splits_of(14336, 4096, 2), splits_of(WIDTH, HIDDEN, CHOSEN)] == [1, 2, 1]
    mixture, rows, (index, shares) = Mixture.of(16, width=544), torch.randn(3, HIDDEN, device=DEVICE).bfloat16(), choices(3)
    assert splits_of(544, HIDDEN, CHOSEN) > 1
    found, expected = mixture(rows, index, shares), mixture.expected(rows, index, shares)
    assert (found - expected).norm() <= 2e-2 * expected.norm()
    assert torch.equal(mixture(rows[1:2], index[1:2], shares[1:2]), found[1:2])


def test_there_is_a_program_for_every_piece() -> None:
    for rows, chosen, count in ((1, 8, 128), (2, 8, 128), (64, 8, 128), (256, 8, 128), (256, 2, 8), (2000, 4, 32)):
        index = torch.rand(rows, count).topk(chosen)[1]
        work = work_of(rows, chosen, count)
        for choice in (index, index % chosen):  # also if all rows agree
            slots = choice.flatten().bincount(minlength=count)
            assert int((-(-slots // work.tile)).sum()) <= work.pieces
    assert work_of(1, 8, 128).pieces == 8 and work_of(256, 8, 128) == (192, 32)


@pytest.mark.filterwarnings("ignore:invalid value")
def test_numbers_that_are_none_choose_experts_that_there_are() -> None:
    logits = torch.full((2, 12), torch.nan, device=DEVICE)
    logits[1, 3] = torch.inf
    index = choose_experts(logits, None, 3, False, True, 0.0, 1.0, torch.float32)[1]
    assert ((index >= 0) & (index < 12)).all()


ROUTERS: dict[str, dict[str, Any]] = {
    "Qwen2Moe": {"norm_topk_prob": False},
    "Qwen3Moe": {"norm_topk_prob": True},
    "Olmoe": {"norm_topk_prob": False},
    "Qwen3Next": {},
    "Qwen3_5Moe": {},
    "Mixtral": {},
    "GraniteMoe": {},
    "GraniteMoeHybrid": {},
    "GptOss": {},
    "MiniMaxM2": {},
    "Lfm2Moe": {"use_expert_bias": True, "routed_scaling_factor": 1.5},
    "Glm4Moe": {"n_group": 1, "routed_scaling_factor": 2.5},
    "DeepseekV3": {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.5},
}


@pytest.mark.parametrize("family", ROUTERS)
def test_routers_are_transformers(family: str) -> None:
    label = f"{family}Text" if family == "Qwen3_5Moe" else family
    sizes = {"num_experts": 12, "num_local_experts": 12, "n_routed_experts": 12, "num_experts_per_tok": 3, "hidden_size": 128}
    config = getattr(transformers, f"{label}Config")(**sizes, **ROUTERS[family])
    model_type = config.model_type.removesuffix("_text")
    module = import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    torch.manual_seed(0)
    router = next(getattr(module, name) for name in dir(module) if re.fullmatch(f"{family}Top[kK]Router", name))(config).to(
        DEVICE
    )
    for tensor in (*router.parameters(), *router.buffers()):
        tensor.data.normal_(std=0.3)
    form = form_of(router)
    assert form is not None
    bias = (torch.randn(12, device=DEVICE) / 8,) if family in ("Lfm2Moe", "MiniMaxM2") else ()
    rows = torch.randn(20, 128, device=DEVICE)
    for found, expected in zip(KernelRouter(router, form)(rows, *bias), router(rows, *bias), strict=True):
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found.sort(1)[0], expected.sort(1)[0], rtol=1e-4, atol=1e-5)


MODELS = ("qwen3_moe", "mixtral", "gpt_oss", "qwen3_5_moe", "granite_hybrid", "minimax_m2")


def mixtures_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [each for each in model.modules() if way_of(each) is not None]


def model_of(name: str, **changes: Any) -> Any:
    return families.build(name, "eager", **changes).to(DEVICE)


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_transformers(name: str) -> None:
    model = model_of(name)
    expected, tokens = copy.deepcopy(model), families.text_of(12)[None].to(DEVICE)
    expected.set_experts_implementation("eager")
    use_experts(model)
    mixtures = [each for each in model.modules() if isinstance(each, KernelExperts)]
    assert mixtures and len(mixtures) == sum(isinstance(each, KernelRouter) for each in model.modules())
    torch.testing.assert_close(model(tokens).logits, expected(tokens).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("name", "bits"), [("qwen3_moe", 4), ("gpt_oss", 8)])
def test_experts_of_fewer_bits(name: str, bits: int) -> None:
    """Logits are those of a model whose experts have the rounded weights."""
    model = model_of(name, num_hidden_layers=1, hidden_size=128, intermediate_size=128, moe_intermediate_size=128)
    rounded, tokens = copy.deepcopy(model), families.text_of(5)[None].to(DEVICE)
    before = weight_size(model)
    for mixture, expected in zip(mixtures_of(model), mixtures_of(rounded), strict=True):
        quantize_experts(mixture, bits, DEVICE)
        for weight in ("gate_up_proj", "down_proj"):
            found, target = getattr(mixture, weight).blocks.weights(), getattr(expected, weight)
            found = found.view(len(target), -1, found.shape[1])
            target.data = found.transpose(1, 2).contiguous() if name == "gpt_oss" else found
    use_experts(model)
    use_experts(rounded)
    torch.testing.assert_close(model(tokens).logits, rounded(tokens).logits, rtol=1e-4, atol=1e-4)
    size, count = weight_size(model)
    assert count == before[1] and size < before[0] / 2


def test_a_mixture_is_compiled_as_a_whole() -> None:
    mixture, rows = model_of("qwen3_moe").model.layers[0].mlp, torch.randn(1, 5, 32, device=DEVICE)
    use_experts(mixture)
    compiled: Any = torch.compile(mixture, backend="aot_eager", fullgraph=True, dynamic=True)
    with torch.inference_mode():
        assert torch.equal(compiled(rows), mixture(rows))


def test_experts_that_the_kernels_do_not_compute_stay() -> None:
    model = model_of("qwen3_moe", hidden_act="relu")
    use_experts(model)
    assert not any(isinstance(each, KernelExperts) for each in model.modules())
