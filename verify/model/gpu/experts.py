"""Mixtures of experts of a model on a GPU: what transformers' modules choose and compute, by kernels of our own.

Modules are replaced that compute a gated activation as transformers' interface of experts does by default, or as gpt-oss; and
their routers, if they score by a softmax or a sigmoid. Others stay as they are. `_default_apply_gate` is private to
transformers. Tested with transformers 5.17 and 5.23.
"""

import inspect
import re
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from transformers import PreTrainedModel
from transformers.integrations.moe import _default_apply_gate

from outrider.verify.model.gpu.forms import BLOCK
from outrider.verify.model.gpu.quantized import BlockLinear, Blocks

# The names of activations in configurations.
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
WEIGHTS = ("gate_up_proj", "down_proj")


class Way(NamedTuple):
    """How experts join gate and up."""

    name: str  # as `outrider.verify.model.gpu.triton_experts.WAYS`
    alpha: float = 1.0
    limit: float = 0.0


class Form(NamedTuple):
    """How a router weighs experts."""

    is_sigmoid: bool = False
    epsilon: float = 0.0  # added to the sum by which shares are divided
    in_float32: bool = False
    is_normed: bool = True  # shares by their sum, where a router does not say it


# By the names of routers' classes.
ROUTERS = {
    r"(Qwen2Moe|Qwen3Moe|Qwen3Next|Qwen3_5Moe|Olmoe|Mixtral|GraniteMoe|GraniteMoeHybrid|GptOss)TopKRouter": Form(),
    r"Lfm2MoeTopKRouter": Form(True, 1e-6),
    r"MiniMaxM2TopKRouter": Form(True),
    r"DeepseekV2TopkRouter": Form(in_float32=True, is_normed=False),
    r"(DeepseekV3|Glm4Moe|Glm4MoeLite|KimiLinear)TopkRouter": Form(True, 1e-20, True),
}


def way_of(module: torch.nn.Module) -> Way | None:
    """How a module's experts join gate and up; None for other modules, and for experts that the kernels do not compute."""
    experts: Any = module
    if type(module).__name__ == "GptOssExperts":
        return Way("clamped", float(experts.alpha), float(experts.limit))
    if getattr(type(module), "_apply_gate", None) is not _default_apply_gate or not experts.has_gate:
        return None
    if getattr(module, "has_post_expert_norm", False) or not experts.is_concatenated:  # transformers 5.17 has no such norm
        return None
    names = (getattr(experts.config, name, None) for name in ("hidden_act", "hidden_activation"))
    found = next((ACTIVATIONS.get(str(name)) for name in names if name), None)
    return None if found is None else Way(found)


def form_of(router: torch.nn.Module) -> Form | None:
    """How a module weighs experts; None for other modules."""
    return next((form for name, form in ROUTERS.items() if re.fullmatch(name, type(router).__name__)), None)


class KernelExperts(torch.nn.Module):
    """The experts of a mixture, computed by the kernels."""

    def __init__(self, experts: Any, way: Way) -> None:
        """`experts` is transformers' module, whose weights it takes."""
        from outrider.verify.model.gpu.triton_experts import counters  # Triton is only needed on a GPU

        super().__init__()
        self.way, self.in_turns = way, not experts.is_concatenated
        for name in WEIGHTS:
            weight = getattr(experts, name)
            setattr(self, name, weight if isinstance(weight, BlockLinear) else _parameter(_flat(experts, weight)))
        self.biases = [getattr(experts, f"{name}_bias") for name in WEIGHTS] if experts.has_bias else []
        for name, bias in zip(WEIGHTS, self.biases, strict=False):
            setattr(self, f"{name}_bias", bias)
        self.gate_up, self.down = (_tensors(getattr(self, name)) for name in WEIGHTS)
        gate_up: Any = self.gate_up_proj
        hidden = gate_up.in_features if isinstance(gate_up, BlockLinear) else gate_up.shape[1]
        self.count = len(cast(torch.Tensor, self.down[0])) // hidden
        self.arrived = counters(hidden, cast(torch.Tensor, self.gate_up[0]).device)
        self.touched = torch.zeros_like(self.arrived[:1])

    def forward(self, rows: torch.Tensor, index: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        from outrider.verify.model.gpu.triton_experts import experts

        way = self.way
        weights = (self.gate_up, self.down, self.biases, self.arrived, self.touched)
        return cast(torch.Tensor, experts(rows, index, shares, *weights, way.name, self.in_turns, way.alpha, way.limit))


class KernelRouter(torch.nn.Module):
    """The router of a mixture, computed by the kernels."""

    def __init__(self, router: Any, form: Form) -> None:
        """`router` is transformers' module, whose weights it takes."""
        from outrider.verify.model.gpu.triton_products import counters, split_of

        super().__init__()
        self.form, self.chosen = form, int(router.top_k)
        self.weight = _parameter(router.weight.data.float() if form.in_float32 else router.weight.data)
        self.bias, self.arrived = getattr(router, "bias", None), counters(len(self.weight), self.weight.device)
        self.split = split_of(self.weight.shape[1], len(self.weight))
        self.e_score_correction_bias: torch.Tensor | None
        self.register_buffer("e_score_correction_bias", getattr(router, "e_score_correction_bias", None))
        self.is_normed = getattr(router, "norm_topk_prob", form.is_normed)
        self.scale, self.groups = getattr(router, "routed_scaling_factor", 1.0), (1, 1)
        if getattr(router, "topk_method", None) != "greedy":
            self.groups = getattr(router, "num_group", None) or 1, getattr(router, "topk_group", None) or 1
        # Releases of transformers differ in what a router returns first.
        given = router.weight.new_zeros(1, self.weight.shape[1]), router.weight.new_zeros(len(self.weight))
        tried = router(*given[: len(inspect.signature(router.forward).parameters)])
        self.places = {
            "index" if not each.is_floating_point() else "shares" if each.shape[1] == self.chosen else "logits": number
            for number, each in enumerate(tried)
        }
        self.dtype = tried[self.places["shares"]].dtype

    def forward(self, rows: torch.Tensor, bias: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        """Rows, [..., hidden], to logits [N, experts], shares and indices [N, chosen], in the order of transformers' module."""
        from outrider.verify.model.gpu.triton_experts import choose_experts
        from outrider.verify.model.gpu.triton_products import linear

        rows = rows.reshape(-1, self.weight.shape[1]).to(self.weight.dtype)
        found = {"logits": linear(rows, self.weight, None, None, None, self.bias, self.arrived, self.split)}
        bias = self.e_score_correction_bias if bias is None else bias
        how = (
            self.chosen,
            self.form.is_sigmoid,
            self.is_normed,
            self.form.epsilon,
            float(self.scale),
            self.dtype,
            *self.groups,
        )
        found["shares"], found["index"] = choose_experts(found["logits"], bias, *how)
        return tuple(found[name] for name in sorted(found, key=self.places.__getitem__))


def use_experts(model: torch.nn.Module) -> None:
    """Replaces a model's mixtures and their routers by those that the kernels compute, in place; they keep their weights."""
    touched: dict[torch.device, torch.Tensor] = {}
    children = [(parent, *named) for parent in list(model.modules()) for named in list(parent.named_children())]
    for parent, name, child in children:
        if (way := way_of(child)) is not None:
            experts = KernelExperts(child, way)
            experts.touched = touched.setdefault(experts.arrived.device, experts.touched)  # one for each device
            setattr(parent, name, experts)
    for parent, name, child in children if touched else ():  # PyTorch's experts fail if kernels are compiled and not run
        if (form := form_of(child)) is not None:
            setattr(parent, name, KernelRouter(child, form))


class TouchedExperts:
    """Counts the experts that a forward uses, on its devices. The host reads the counts of a forward whose results it has."""

    def __init__(self, mixtures: Sequence[KernelExperts], used: int) -> None:
        """`used` are the experts that a row uses of each mixture."""
        self._mixtures, self.experts = len(mixtures), (mixtures[0].count, used)
        self._devices = list({id(each.touched): each.touched for each in mixtures}.values())
        self._host = [torch.zeros(1, dtype=torch.int32, pin_memory=each.is_cuda) for each in self._devices]

    def clear(self) -> None:
        """Call it before a forward."""
        for each in self._devices:
            each.zero_()

    def fetch(self) -> None:
        """Call it after a forward; waits for nothing."""
        for host, each in zip(self._host, self._devices, strict=True):
            host.copy_(each, non_blocking=True)

    @property
    def mean(self) -> float:
        """Of the mixtures. A forward of one row counts nothing."""
        return max(self.experts[1], sum(map(int, self._host)) / self._mixtures)


def touched_experts(model: PreTrainedModel) -> TouchedExperts | None:
    """Counts the experts of a model's mixtures; None if it has none, or if not all are computed by the kernels alike."""
    mixtures = [each for each in model.modules() if isinstance(each, KernelExperts)]
    used = getattr(model.config.get_text_config(), "num_experts_per_tok", None)
    if used is None or len({each.count for each in mixtures}) != 1 or not used < mixtures[0].count:
        return None
    return TouchedExperts(mixtures, used)


def quantize_experts(experts: Any, bits: int, device: torch.device) -> None:
    """Rounds the weights of transformers' module of experts to `bits`, on this device. One of them is there at a time."""
    for name in WEIGHTS:
        weight = _flat(experts, getattr(experts, name).data.to(device))
        if weight.shape[1] % BLOCK:
            continue
        delattr(experts, name)
        setattr(experts, name, BlockLinear.of(Blocks.of(weight, bits), weight.dtype))


def _flat(experts: Any, weight: torch.Tensor) -> torch.Tensor:
    """Weights [experts, outputs, inputs], or transposed as gpt-oss has them, as [experts * outputs, inputs]."""
    return (weight.transpose(1, 2).contiguous() if experts.is_transposed else weight).flatten(0, 1)


def _parameter(weight: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(weight.detach(), requires_grad=False)


def _tensors(weight: Any) -> list[torch.Tensor | None]:
    """What the operation takes of a weight."""
    return list(weight.blocks[1:]) if isinstance(weight, BlockLinear) else [weight, None, None, None]
