"""Tree attention: the attention function that unmodified transformers models call, over our own KV cache.

The rows of a forward are the last committed token and a draft tree below it (or a chunk of prompt). Each row sees the
whole committed prefix, itself and its ancestors. Registered with transformers under a name that has no mask function, so
the model builds no mask of its own.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from transformers import AttentionInterface

from verify.cache import KVCache

NAME = "outrider"


class AttentionStep:
    """What one forward's attention needs: the cache, and who sees whom among the new rows.

    `ancestors` is bool [N, N], or None for rows that follow one another (a chunk of prompt, or a single row).
    """

    def __init__(self, cache: KVCache, rows: int, ancestors: torch.Tensor | None, groups: int) -> None:
        self.cache = cache
        self._rows = rows
        self._ancestors = ancestors
        self._groups = groups
        self._masks: dict[int | None, torch.Tensor | None] = {}

    def mask(self, window: int | None, like: torch.Tensor) -> torch.Tensor | None:
        """Additive mask [groups * N, length + N] in the dtype of `like`; None where every row sees everything."""
        if window not in self._masks:
            self._masks[window] = self._build(window, like)
        return self._masks[window]

    def _build(self, window: int | None, like: torch.Tensor) -> torch.Tensor | None:
        start, rows = self.cache.length, self._rows
        if rows == 1 and (window is None or start < window):
            return None
        seen = self._ancestors
        if seen is None:
            seen = torch.ones(rows, rows, dtype=torch.bool, device=like.device).tril()
        allowed = torch.ones(rows, start + rows, dtype=torch.bool, device=like.device)
        allowed[:, start:] = seen
        if window is not None:
            depth = seen.sum(1)  # a row's position is start + depth - 1
            first = start + depth - window
            prefix = torch.arange(start, device=like.device)
            allowed[:, :start] &= prefix >= first[:, None]
            allowed[:, start:] &= (depth - 1) + start >= first[:, None]
        mask = torch.zeros(allowed.shape, dtype=like.dtype, device=like.device)
        mask.masked_fill_(~allowed, -torch.inf)
        return mask.repeat(self._groups, 1)


def tree_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, heads, N, head_dim]
    key: torch.Tensor,  # [1, kv_heads, N, head_dim]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    step: AttentionStep | None = None,
    **extra: Any,
) -> tuple[torch.Tensor, None]:
    """Writes the new rows to the cache and attends; returns [1, N, heads, head_dim]."""
    if extra.get("s_aux") is not None or extra.get("softcap") is not None:
        raise ValueError("This model's attention has sinks or soft-capping, which tree attention lacks so far.")
    if step is None:
        raise ValueError("This model does not hand keyword arguments on to its attention, so it cannot be served.")
    keys, values = step.cache.write(cast(int, module.layer_idx), key[0], value[0])
    heads, rows, head_dim = query.shape[1:]
    kv_heads = key.shape[1]
    # The query heads that share a key head become more rows of it: no key or value is ever repeated.
    packed = query.reshape(1, kv_heads, heads // kv_heads * rows, head_dim)
    out = torch.nn.functional.scaled_dot_product_attention(
        packed, keys[None], values[None], attn_mask=step.mask(sliding_window, query), scale=scaling
    )
    return out.reshape(1, heads, rows, head_dim).transpose(1, 2), None


AttentionInterface.register(NAME, tree_attention)
