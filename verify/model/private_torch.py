"""The functions of PyTorch that are used although their names are private.

They are oneDNN's product with packed weights, flash attention that returns the scores' log-sum-exp on a CPU, what the CPU can
do, and the flattening of nested arguments. Tested with PyTorch 2.13. `tests/verify/model/test_private_torch.py` fails if one
of them is missing or computes something else.

Without oneDNN's product, `torch.nn.functional.linear` computes the same, but repacks the weights in each call, which takes
most of the time of a step of a few rows. Without flash attention, two matrix products and `logsumexp` compute the same, with
memory for all scores. Without the CPU's properties, `torch.cpu.get_capabilities` and `outrider.verify.model.cpu.llvm.has`
have them, but not the permission to use tile registers, so AMX would be lost. Without the flattening, the containers that
layers pass on can be walked by hand.
"""

from __future__ import annotations

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

__all__ = [
    "attend_flash",
    "enable_amx",
    "has_amx",
    "has_bfloat16_vectors",
    "multiplies_bfloat16",
    "multiply_onednn",
    "pack_onednn",
    "tree_flatten",
    "tree_unflatten",
]


def pack_onednn(weight: torch.Tensor, rows: int) -> torch.Tensor:
    """Weights [outputs, inputs] in oneDNN's layout for products of about `rows` rows."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    return packed


def multiply_onednn(rows: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """[..., inputs] to [..., outputs], by weights of `pack_onednn`. Scriptable, because a trace cannot record this operator."""
    found: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")
    return found


def multiplies_bfloat16() -> bool:
    """Whether oneDNN multiplies bfloat16 on this CPU."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def attend_flash(
    query: torch.Tensor,  # [1, heads, M, D]
    keys: torch.Tensor,  # [1, heads, L, D]
    values: torch.Tensor,
    mask: torch.Tensor | None,  # [M, L], additive
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output, [1, heads, M, D], and the scores' log-sum-exp, float32 [1, heads, M], on a CPU. Scriptable."""
    out, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, keys, values, 0.0, False, attn_mask=mask, scale=scaling
    )
    return out, total


def has_amx() -> bool:
    """Whether this CPU has tile registers (AMX)."""
    return torch.cpu._is_amx_tile_supported()


def enable_amx() -> bool:
    """Asks the operating system for the tile registers; returns whether this process may use them."""
    return torch.cpu._init_amx()


def has_bfloat16_vectors() -> bool:
    """Whether this CPU has AVX-512's instructions for bfloat16."""
    return torch.cpu._is_avx512_bf16_supported()
