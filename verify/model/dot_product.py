"""Attention of a layer's rows to keys and values, by the fastest means that torch has for them.

On CPUs that multiply bfloat16 but have no AMX, torch's attention converts to float32 first. Two products of bfloat16 take half
the time where there is enough to multiply.
"""

from __future__ import annotations

import torch

# Whether products of bfloat16 are faster than torch's attention, which uses AMX itself.
IS_FAST = torch.cpu._is_avx512_bf16_supported() and not torch.cpu._is_amx_tile_supported()
LEAST_WORK = 5_000_000  # multiplications of a head's scores; with fewer, torch's attention is as fast
BLOCK_ROWS = 512  # whose scores are in the CPU's caches together
SAMPLED = 16  # every 16th key gives an estimate of a row's largest score


def dot_product_attention(
    query: torch.Tensor,  # [kv_heads, N, key_dim]
    keys: torch.Tensor,  # [kv_heads, L, key_dim]
    values: torch.Tensor,  # [kv_heads, L, value_dim]
    mask: torch.Tensor | None,  # [N, L], additive; None if nothing is masked
    scaling: float,
    is_fast: bool = IS_FAST,
    least_work: int = LEAST_WORK,
) -> torch.Tensor:
    """Weighted values, [kv_heads, N, value_dim]. Scriptable."""
    is_bfloat16 = query.dtype == torch.bfloat16 and query.device.type == "cpu"
    if is_fast and is_bfloat16 and query.size(1) * keys.size(1) * keys.size(2) >= least_work:
        return _by_products(query, keys, values, torch.zeros_like(query[0, :, :1]) if mask is None else mask, scaling)
    out = torch.nn.functional.scaled_dot_product_attention(query[None], keys[None], values[None], attn_mask=mask, scale=scaling)
    return out[0]


def _by_products(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,  # [N, L or 1]
    scaling: float,
    block: int = BLOCK_ROWS,
    sampled: int = SAMPLED,
) -> torch.Tensor:
    """As `dot_product_attention`.

    A product rounds scores to bfloat16, relative to their size. So an estimate of each row's largest score is subtracted in the
    same product: the scores that matter are then near zero, where rounding is fine.
    """
    out = torch.empty(query.size(0), query.size(1), values.size(2), dtype=query.dtype)
    for head in range(query.size(0)):
        of_head = keys[head].t()
        for start in range(0, query.size(1), block):
            rows, masked = query[head, start : start + block], mask[start : start + block]
            some = torch.addmm(masked[:, ::sampled], rows, of_head[:, ::sampled], alpha=scaling)
            largest = torch.nan_to_num(some.amax(-1, keepdim=True), neginf=0.0)  # all of them may be masked
            scores = torch.addmm(masked - largest, rows, of_head, alpha=scaling)
            out[head, start : start + block] = scores.softmax(-1) @ values[head]
    return out
