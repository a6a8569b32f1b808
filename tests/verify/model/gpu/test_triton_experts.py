"""The kernels of mixtures against transformers' experts and routers, on a GPU if there is one, else in Triton's interpreter."""

import copy
import re
from importlib import import_module
from typing import Any

import pytest
import torch
import transformers

from outrider.verify.model.gpu.experts import (
    KernelExperts,
    KernelRouter,
    form_of,
    quantize_experts,
    touched_experts,
    use_experts,
    way_of,
)
from outrider.verify.model.gpu.quantized import Blocks
from outrider.verify.model.gpu.triton_experts import choose_experts, counters, experts, splits_of, work_of
from outrider.verify.model.sizes import weight_size
from tests.verify.model import families
from tests.verify.model.gpu.conftest import DEVICE
from tests.verify.model.gpu.test_triton_products import EACH_COUNT

pytestmark = pytest.mark.usefixtures("fresh_memory_is_nan")
EXPERTS, CHOSEN, HIDDEN, WIDTH = 12, 3, 64, 32
SPLIT = 544  # number of inputs at which the sums of the second product are split


@EACH_COUNT
@pytest.mark.parametrize(
    ("bits", "is_clamped"), [(16, False), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((8, True), (4, False)))]
)
def test_a_row_has_the_same_bits_in_any_number_of_rows(bits: int, is_clamped: bool, counts: tuple[int, ...]) -> None:
    """Half of the inputs cancel the others, so another order of the sums shows."""
    torch.manual_seed(bits)
    weights = [torch.randn(EXPERTS, *shape, device=DEVICE).bfloat16() for shape in ((2 * WIDTH, HIDDEN), (HIDDEN, WIDTH))]
    weights[0][..., HIDDEN // 2 :] = -weights[0][..., : HIDDEN // 2].flip(-1)
    flat, biases = [each.flatten(0, 1) for each in weights], [each[..., 0] for each in weights if is_clamped]
    packed = [[each, None, None, None] if bits == 16 else list(Blocks.of(each, bits)[1:]) for each in flat]
    arrived, touched, half = (
        counters(HIDDEN, DEVICE),
        torch.zeros(1, dtype=torch.int32, device=DEVICE),
        torch.randn(max(counts), HIDDEN // 2, device=DEVICE).bfloat16(),
    )
    scores = (
        torch.randn(max(counts), EXPERTS, device=DEVICE) - torch.arange(EXPERTS, device=DEVICE) / 3
    )  # some are often chosen
    given = torch.cat([half, half.flip(1)], 1), scores.topk(CHOSEN)[1], scores.softmax(1).topk(CHOSEN)[0]

    def mixture(rows: torch.Tensor, index: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        way = ("clamped", True, 1.702, 7.0) if is_clamped else ("silu", False, 1.0, 0.0)
        return experts(rows, index, shares, *packed, biases, arrived, touched, *way)  # type: ignore[no-any-return]

    whole = mixture(*given)
    assert whole.isfinite().all()
    for count in counts:
        turned = [each[:count].flip(0) for each in given]
        touched.zero_()
        assert torch.equal(mixture(*turned), whole[:count].flip(0)), count
        assert touched.item() == (given[1][:count].unique().numel() if count > 1 else 0)
    assert not arrived.any()


def test_there_is_a_program_for_every_piece() -> None:
    assert [splits_of(768, 2048, 8), splits_of(14336, 4096, 2), splits_of(96, 160, 3)] == [1, 2, 1]
    assert splits_of(SPLIT, 160, 2) > 1
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
    **{name: {} for name in ("Qwen3Next", "Qwen3_5Moe", "Mixtral", "GraniteMoe", "GraniteMoeHybrid", "GptOss", "MiniMaxM2")},
    "Lfm2Moe": {"use_expert_bias": True, "routed_scaling_factor": 1.5},
    "Glm4Moe": {"n_group": 1, "routed_scaling_factor": 2.5},
    **{name: {"n_group": 1, "routed_scaling_factor": 1.8} for name in ("Glm4MoeLite", "KimiLinear")},
    "DeepseekV3": {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.5},
    "DeepseekV2": {"topk_method": "greedy", "routed_scaling_factor": 2.5},
}
GROUPS = {"n_group": 4, "topk_group": 2}
IN_GROUPS = [("DeepseekV2", {"topk_method": "group_limited_greedy", "topk_group": 3}), ("DeepseekV3", {}), ("Glm4Moe", {})]


@pytest.mark.parametrize(
    ("family", "changes"), [*((family, {}) for family in ROUTERS), *((f, GROUPS | c) for f, c in IN_GROUPS)]
)
def test_routers_are_transformers(family: str, changes: dict[str, Any]) -> None:
    label = f"{family}Text" if family == "Qwen3_5Moe" else family
    sizes = {"num_experts": 12, "num_local_experts": 12, "n_routed_experts": 12, "num_experts_per_tok": 3, "hidden_size": 128}
    config = getattr(transformers, f"{label}Config")(**sizes | ROUTERS[family] | changes)
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


# Sizes that are no whole blocks of the kernels.
UNEVEN = {"hidden_size": 160, "moe_intermediate_size": 96, "intermediate_size": 96, "num_experts_per_tok": 3}
ONE = {"num_hidden_layers": 1}
MODELS: list[Any] = [
    *((name, ONE) for name in ("qwen3_moe", "mixtral", "gpt_oss")),
    # Of other routers alone.
    *(pytest.param(name, {}, marks=pytest.mark.slow) for name in ("qwen3_5_moe", "granite_hybrid", "minimax_m2")),
    ("qwen3_moe", {"hidden_act": "gelu_pytorch_tanh", **ONE}),
    *((name, UNEVEN | ONE) for name in ("qwen3_moe", "gpt_oss")),
    ("qwen3_moe", {"moe_intermediate_size": SPLIT, **ONE}),
]


def mixtures_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [each for each in model.modules() if way_of(each) is not None]


def model_of(name: str, **changes: Any) -> Any:
    return families.build(name, "eager", **changes).to(DEVICE)


@pytest.mark.parametrize(("name", "changes"), MODELS)
def test_logits_are_transformers(name: str, changes: dict[str, Any]) -> None:
    model = model_of(name, **changes)
    expected, tokens = copy.deepcopy(model), families.text_of(12)[None].to(DEVICE)
    expected.set_experts_implementation("eager")
    use_experts(model)
    mixtures = [each for each in model.modules() if isinstance(each, KernelExperts)]
    assert mixtures and len(mixtures) == sum(isinstance(each, KernelRouter) for each in model.modules())
    torch.testing.assert_close(model(tokens).logits, expected(tokens).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_outputs_in_bfloat16_are_near_those_of_the_same_weights_in_float32(name: str) -> None:
    model = model_of(name, **UNEVEN, num_hidden_layers=1)
    rounded = copy.deepcopy(model).bfloat16()
    model.load_state_dict(rounded.state_dict())
    model.set_experts_implementation("eager")
    use_experts(rounded)
    [exact], [mixture] = mixtures_of(model), [each for each in rounded.modules() if isinstance(each, KernelExperts)]
    rows, (shares, index) = torch.randn(5, 160, device=DEVICE).bfloat16(), torch.rand(5, 4, device=DEVICE).topk(3)
    found, expected = mixture(rows, index, shares), exact(rows.float(), index, shares)
    assert found.dtype == rows.dtype
    assert (found - expected).norm() <= 3e-2 * expected.norm()


@pytest.mark.parametrize(("name", "bits"), [("gpt_oss", 4), pytest.param("qwen3_moe", 8, marks=pytest.mark.slow)])
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


def test_experts_that_a_forward_touches_are_counted() -> None:
    model, tokens = model_of("qwen3_moe", num_experts_per_tok=2), families.text_of(5)[None].to(DEVICE)
    use_experts(model)
    found, chosen = touched_experts(model), list[int]()
    assert found is not None and found.experts == (4, 2)
    for router in (each for each in model.modules() if isinstance(each, KernelRouter)):
        router.register_forward_hook(lambda _, __, given: chosen.append(given[-1].unique().numel()))
    for rows in (5, 1):
        chosen.clear()
        found.clear()
        model(tokens[:, :rows])
        found.fetch()
        assert found.mean == sum(chosen) / len(chosen)
    assert touched_experts(families.build("llama", "eager")) is None


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
