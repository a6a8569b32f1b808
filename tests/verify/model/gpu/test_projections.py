"""Products of q, k and v, and of gate and up, merged: the same logits by fewer kernels."""

from typing import Any

import pytest
import torch

from outrider.verify.model.attention.interface import NAME
from outrider.verify.model.batch import ForwardBatch
from outrider.verify.model.gpu.projections import MergedLinear, MergedPart, joined, merge_projections
from outrider.verify.model.torch_runner import TorchRunner
from tests.verify.model.families import ATTENDING, build


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
    assert torch.allclose(part(others), second(others), atol=1e-6)
    assert torch.allclose(merged(rows), first(rows), atol=1e-6)
    assert torch.allclose(part(others), second(others), atol=1e-6)
    assert torch.allclose(part(rows), second(rows), atol=1e-6)
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
