"""Attention of a layer's rows to keys and values, by the fastest means that torch has for them.

On a CPU without AMX, torch's attention converts bfloat16 to float32. Where the CPU multiplies bfloat16 faster than float32,
as AMD's do since Zen 4, two products of bfloat16 take half the time if there is enough to multiply, and torch's attention
takes longer for a single row than for two. That is found out by timing products, once on a machine: the choice is stored with
the machine's other findings.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from outrider.verify.findings import choice_file, load_choice, save_choice
from outrider.verify.model.private_torch import has_amx, has_bfloat16_vectors

# The inputs and outputs of the products that are timed.
TIMED = 512


# Query, keys, values, mask and scaling, as `dot_product_attention`.
DotProducts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, float], torch.Tensor]


def chosen(device: torch.device, dtype: torch.dtype, findings: Path | None) -> DotProducts:
    """The attention function for a model of this dtype.

    The choice is read from the folder `findings`, or timed and saved there. Most CPUs leave none.
    """
    if device.type != "cpu" or dtype != torch.bfloat16 or has_amx() or not has_bfloat16_vectors():
        return dot_product_attention
    threads = torch.get_num_threads()
    file = choice_file(findings, "attention", dtype, threads, torch.__version__, TIMED)
    is_fast = load_choice(file)
    if not isinstance(is_fast, bool):
        is_fast = multiplies_fast(threads)
        save_choice(is_fast, file)
    return fast_attention if is_fast else dot_product_attention


@cache
def multiplies_fast(threads: int) -> bool:
    """Whether this CPU multiplies bfloat16 faster than float32. Times a few products."""
    return shortest_seconds(torch.bfloat16) < shortest_seconds(torch.float32)


def shortest_seconds(dtype: torch.dtype) -> float:
    """Seconds of a product, the shortest of a few."""
    rows, weights, times = torch.ones(TIMED // 4, TIMED, dtype=dtype), torch.ones(TIMED, TIMED, dtype=dtype), []
    for _ in range(6):
        started = time.perf_counter()
        torch.mm(rows, weights)
        times.append(time.perf_counter() - started)
    return min(times)


# The least number of rows of a head. For fewer, torch's attention is as fast, unless the text is long.
LEAST_ROWS = 33
# From this many multiplications for a head's scores on, products are faster for any number of rows.
LEAST_WORK = 5_000_000
# The least number of elements of a head's keys. A product over all heads copies the keys, which takes too long for more.
LEAST_KEYS = 200_000
# The largest number of elements of the scores of all heads. A product over all heads is slower for more.
MOST_SCORES = 2_000_000
# The scores of this many rows fit into the CPU's caches together.
BLOCK_ROWS = 512
# Every 16th key gives an estimate of a row's largest score.
SAMPLED = 16


def dot_product_attention(
    query: torch.Tensor,  # [kv_heads, N, key_dim]
    keys: torch.Tensor,  # [kv_heads, L, key_dim]
    values: torch.Tensor,  # [kv_heads, L, value_dim]
    mask: torch.Tensor | None,  # [N, L], additive; None if nothing is masked
    scaling: float,
    is_fast: bool = False,  # whether products of bfloat16 are faster than torch's attention
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


def fast_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scaling: float
) -> torch.Tensor:
    """`dot_product_attention` where products of bfloat16 are fast. Scriptable."""
    return dot_product_attention(query, keys, values, mask, scaling, is_fast=True)


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
