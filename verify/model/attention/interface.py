"""The attention function that unmodified transformers models call, and what it asks to compute attention.

The rows of a forward are the root (the last committed token) and a draft tree below it, or a chunk of the prompt. Each row
attends to the committed prefix, its ancestors and itself. transformers has no mask function registered under this name, so the
model builds no mask of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from transformers import AttentionInterface

from outrider.verify.model.kwarg_injector import NotPassedOn

NAME = "outrider"


@dataclass(frozen=True)
class Layer:
    """Attention parameters of one layer."""

    index: int
    scaling: float
    window: int | None = None  # sliding window in positions, the row's own included
    softcap: float | None = None  # bound of the scores (Gemma 2)
    sinks: torch.Tensor | None = None  # [heads]; logit of a key without a value (gpt-oss)


class Attention(Protocol):
    """The attention of one forward, called by every layer."""

    def attend(self, layer: Layer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Query [heads, N, head_dim], keys and values [kv_heads, N, head_dim] of the new rows to [heads, N, head_dim]."""


def tree_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, heads, N, head_dim]
    key: torch.Tensor,  # [1, kv_heads, N, head_dim]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    attention: Attention | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function registered with transformers; returns [1, N, heads, head_dim]. Raises ValueError."""
    if attention is None:
        raise NotPassedOn("attention")
    if attention_mask is not None:
        raise ValueError("This model computes attention masks of its own, which are not supported.")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer = Layer(cache_layer(module), scale, sliding_window, softcap, s_aux)
    return attention.attend(layer, query[0], key[0], value[0]).transpose(0, 1).contiguous()[None], None


AttentionInterface.register(NAME, tree_attention)


def cache_layer(module: torch.nn.Module) -> int:
    """The layer of the cache that holds an attention module's keys and values."""
    return cast(int, getattr(module, "cache_layer", module.layer_idx))
