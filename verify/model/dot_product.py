"""Attention of a layer's rows to keys and values, by the fastest means that torch has for them.

On a CPU without AMX, torch's attention converts bfloat16 to float32. Where the CPU multiplies bfloat16 faster than float32, as
AMD's do since Zen 4, two products of bfloat16 take half the time if there is enough to multiply, and torch's attention takes
longer for a single row than for two.
"""

from __future__ import annotations

import time

import torch

TIMED = 512  # inputs and outputs of the products that are timed


def multiplies_fast() -> bool:
    """Whether this CPU has no AMX, but multiplies bfloat16 faster than float32. Times a few products."""
    if torch.cpu._is_amx_tile_supported() or not torch.cpu._is_avx512_bf16_supported():
        return False
    return shortest_seconds(torch.bfloat16) < shortest_seconds(torch.float32)


def shortest_seconds(dtype: torch.dtype) -> float:
    """Seconds of a product, the shortest of a few."""
    rows, weights, times = torch.ones(TIMED // 4, TIMED, dtype=dtype), torch.ones(TIMED, TIMED, dtype=dtype), []
    for _ in range(6):
        started = time.perf_counter()
        torch.mm(rows, weights)
        times.append(time.perf_counter() - started)
    return min(times)


IS_FAST = multiplies_fast()  # whether products of bfloat16 are faster than torch's attention
LEAST_ROWS = 33  # of a head; torch's attention is as fast for fewer, unless the text is long
LEAST_WORK = 5_000_000  # multiplications for a head's scores, from which products are faster for any number of rows
LEAST_KEYS = 200_000  # elements of a head's keys; a product over all heads copies the keys, which takes too long for more
MOST_SCORES = 2_000_000  # elements of the scores of all heads; a product over all heads is slower for more
BLOCK_ROWS = 512  # whose scores are in the CPU's caches together
SAMPLED = 16  # every 16th key gives an estimate of a row's largest score


def dot_product_attention(
    query: torch.Tensor,  # [kv_heads, N, key_dim]
    keys: torch.Tensor,  # [kv_heads, L, key_dim]
    values: torch.Tensor,  # [kv_heads, L, value_dim]
    mask: torch.Tensor | None,  # [N, L], additive; None if nothing is masked
    scaling: float,
    is_fast: bool = IS_FAST,
    least_rows: int = LEAST_ROWS,
    least_work: int = LEAST_WORK,
    least_keys: int = LEAST_KEYS,
    most_scores: int = MOST_SCORES,
) -> torch.Tensor:
    """Weighted values, [kv_heads, N, value_dim]. Scriptable."""
    rows, size = query.size(1), keys.size(1) * keys.size(2)
    if is_fast and query.dtype == torch.bfloat16 and query.device.type == "cpu":
        added = torch.zeros_like(query[0, :, :1]) if mask is None else mask
        if rows * size >= least_work and (size >= least_keys or query.size(0) * rows * keys.size(1) > most_scores):
            return _by_head(query, keys, values, added, scaling)
        if rows >= least_rows:
            return _by_products(query, keys, values, added, scaling)
        if rows == 1:
            query = query.repeat(1, 2, 1)  # a view would be slower
    out = torch.nn.functional.scaled_dot_product_attention(query[None], keys[None], values[None], attn_mask=mask, scale=scaling)
    return out[0, :, :rows]


def _by_head(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,  # [N, L or 1]
    scaling: float,
    block: int = BLOCK_ROWS,
) -> torch.Tensor:
    """`_by_products` for each head and each block of rows alone."""
    out = torch.empty(query.size(0), query.size(1), values.size(2), dtype=query.dtype)
    for head in range(query.size(0)):
        for start in range(0, query.size(1), block):
            rows, masked = query[head, start : start + block], mask[start : start + block]
            out[head, start : start + block] = _by_products(rows, keys[head], values[head], masked, scaling)
    return out


def _by_products(
    query: torch.Tensor,  # [N, key_dim] of one head, or [kv_heads, N, key_dim]; keys and values likewise
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,  # [N, L or 1]
    scaling: float,
    sampled: int = SAMPLED,
) -> torch.Tensor:
    """As `dot_product_attention`.

    A product rounds scores to bfloat16, relative to their size. So an estimate of each row's largest score is subtracted in the
    same product: the scores that matter are then near zero, where rounding is fine.
    """
    some = _add_scores(mask[:, ::sampled], query, keys[..., ::sampled, :], scaling)
    largest = torch.nan_to_num(some.amax(-1, keepdim=True), neginf=0.0)  # all of them may be masked
    return _add_scores(mask - largest, query, keys, scaling).softmax(-1) @ values


def _add_scores(added: torch.Tensor, query: torch.Tensor, keys: torch.Tensor, scaling: float) -> torch.Tensor:
    """`added` plus the scaled products of queries and keys, rounded once."""
    columns = keys.transpose(-2, -1)
    if query.dim() == 2:
        return torch.addmm(added, query, columns, alpha=scaling)
    return torch.baddbmm(added, query, columns, alpha=scaling)
