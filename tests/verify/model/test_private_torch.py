"""PyTorch's private functions exist in the installed version, and compute what is used of them."""

from __future__ import annotations

import pytest
import torch

from outrider.verify.model import private_torch
from outrider.verify.model.private_torch import attend_flash, multiply_onednn, pack_onednn, tree_flatten, tree_unflatten

# Operators, and the types of their arguments.
OPERATORS = {
    "mkldnn._reorder_linear_weight": ["Tensor", "Optional[int]"],
    "mkldnn._linear_pointwise": [*["Tensor"] * 2, "Optional[Tensor]", "str", "List[Optional[number]]", "Optional[str]"],
    "mkldnn._is_mkldnn_bf16_supported": [],
    "aten._scaled_dot_product_flash_attention_for_cpu": [
        *["Tensor"] * 3,
        *("float", "bool", "Optional[Tensor]", "Optional[float]"),
    ],
}


@pytest.mark.parametrize("name", OPERATORS)
def test_the_operators_take_these_arguments(name: str) -> None:
    namespace, operator = name.split(".")
    found = getattr(getattr(torch.ops, namespace), operator, None)
    here = f"PyTorch {torch.__version__}; private_torch.py says what to use instead."
    assert found is not None, f"There is no operator {name} in {here}"
    types = [str(argument.type) for argument in found.default._schema.arguments]
    assert types == OPERATORS[name], f"The arguments of the operator {name} are others in {here}"


@pytest.mark.parametrize("name", ["_is_amx_tile_supported", "_is_avx512_bf16_supported", "_init_amx"])
def test_the_cpus_properties_are_known(name: str) -> None:
    assert hasattr(torch.cpu, name), f"There is no torch.cpu.{name} in PyTorch {torch.__version__}; see private_torch.py."


def test_the_cpus_properties_are_truth_values() -> None:
    for found in (private_torch.has_amx(), private_torch.has_bfloat16_vectors(), private_torch.multiplies_bfloat16()):
        assert isinstance(found, bool)
    assert private_torch.has_amx() or not private_torch.enable_amx()


@pytest.mark.parametrize("bias", [None, torch.arange(5.0)])
def test_a_packed_product_is_that_of_a_linear_layer(bias: torch.Tensor | None) -> None:
    weight, rows = torch.arange(15.0).view(5, 3), torch.arange(12.0).view(1, 4, 3)
    with torch.inference_mode():
        found = multiply_onednn(rows, pack_onednn(weight, 16), bias)
    assert torch.equal(found, torch.nn.functional.linear(rows, weight, bias))  # of small integers, which are not rounded


def test_flash_attention_returns_the_log_sum_exp() -> None:
    generator = torch.Generator().manual_seed(0)
    query, keys, values = (torch.randn(1, 2, count, 8, generator=generator) for count in (3, 5, 5))
    mask = torch.zeros(3, 5).masked_fill_(torch.ones(3, 5, dtype=torch.bool).triu(3), -torch.inf)
    scores = 0.5 * query @ keys.transpose(2, 3) + mask
    out, total = attend_flash(query, keys, values, mask, 0.5)
    assert torch.allclose(out, scores.softmax(-1) @ values, atol=1e-6)
    assert torch.allclose(total, scores.logsumexp(-1), atol=1e-6)


def test_nested_arguments_are_flattened_in_order() -> None:
    nested = {"a": (1, [2, None]), "b": 3}
    leaves, form = tree_flatten(nested)
    assert leaves == [1, 2, None, 3]
    assert tree_unflatten([4, 5, 6, 7], form) == {"a": (4, [5, 6]), "b": 7}
