"""Packed layers give the same results up to rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from outrider.verify.model.cpu.packing import EXACT_ROWS, PackedLinear, padded_count
from outrider.verify.verifier import PREFILL_CHUNK_TOKENS


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 17, 65, 66, 300])
def test_packed_layer_equals_linear(bias: bool, rows: int) -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(48, 33, bias=bias)
    given = torch.randn(1, rows, 48)
    with torch.inference_mode():
        assert torch.allclose(PackedLinear(linear)(given), linear(given), atol=1e-5)


def test_products_of_chunks_have_few_sizes() -> None:
    """oneDNN keeps a kernel of each size, so prompts of every length must not need a kernel each."""
    sizes = set()

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
            if operator is torch.ops.mkldnn._linear_pointwise.default:
                sizes.add(args[0].shape[1])
            return operator(*args, **(kwargs or {}))

    layer = PackedLinear(torch.nn.Linear(4, 4))
    with torch.inference_mode(), Products():  # type: ignore[no-untyped-call]
        for rows in range(1, PREFILL_CHUNK_TOKENS + 1):
            assert layer(torch.zeros(1, rows, 4)).shape == (1, rows, 4)
    assert {*range(1, EXACT_ROWS + 1)} <= sizes  # small trees are not padded
    assert len(sizes) <= EXACT_ROWS + 32


def test_padding_is_at_most_an_eighth() -> None:
    assert all(rows <= padded_count(rows) <= 9 * rows / 8 for rows in range(1, 2000))
