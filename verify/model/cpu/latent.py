"""Latent attention over its compressed cache: a position is stored as its latent, not as keys and values of all heads.

transformers' layers of this kind expand latents by a method `expand_kv`. It is replaced: queries are multiplied by weights
that would expand keys, and outputs by those that would expand values, so all heads attend to the latents themselves
(DeepSeek-V2, arXiv 2405.04434, section 2.1.2). A long part of a prompt expands all latents instead, which takes fewer products.
"""

from __future__ import annotations

from typing import Any

import torch

from outrider.verify.model.packed import is_plain

# The name in transformers of the layer that expands latents.
EXPANSION = "kv_b_proj"


class Latent(torch.nn.Module):
    """The weights that expand the latents of one layer. Replaces the linear layer that holds them."""

    def __init__(self, linear: torch.nn.Linear, key_dim: int, value_dim: int) -> None:
        """`key_dim` without the rotary part, which all heads share as it is."""
        super().__init__()
        self.weight, self.key_dim, self.value_dim, self.rank = linear.weight, key_dim, value_dim, linear.in_features

    def _parts(self) -> list[torch.Tensor]:
        """The weights of keys and of values, [heads, width, rank] each."""
        return list(self.weight.view(-1, self.key_dim + self.value_dim, self.rank).split([self.key_dim, self.value_dim], 1))

    def expand(self, query: torch.Tensor, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As in `outrider.verify.model.attention.Latent`: what the model computes without a cache."""
        both = torch.nn.functional.linear(latents[0, :, : self.rank], self.weight)
        rows = both.view(len(both), -1, self.key_dim + self.value_dim).transpose(0, 1)
        keys, values = rows.split([self.key_dim, self.value_dim], -1)
        return query, torch.cat([keys, latents[..., self.rank :].expand(len(keys), -1, -1)], -1), values

    def absorb(self, query: torch.Tensor, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As in `outrider.verify.model.attention.Latent`."""
        of_latents = query[..., : self.key_dim] @ self._parts()[0]
        return torch.cat([of_latents, query[..., self.key_dim :]], -1), latents, latents[..., : self.rank]

    def values(self, outputs: torch.Tensor) -> torch.Tensor:
        """As in `outrider.verify.model.attention.Latent`."""
        return outputs @ self._parts()[1].transpose(1, 2)


def keep_latents(model: torch.nn.Module) -> None:
    """Makes the model's latent attention attend to latents. Layers whose weights are quantised keep keys and values."""
    modules: list[Any] = list(model.modules())
    for module in modules:
        linear: Any = getattr(module, EXPANSION, None)
        if hasattr(module, "expand_kv") and is_plain(linear) and getattr(linear, "bias", None) is None:
            module.kv_b_proj = module.latent = Latent(linear, module.qk_nope_head_dim, module.v_head_dim)
            module.expand_kv = together


def together(latents: torch.Tensor, rotary: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Replaces `expand_kv`: one head's keys [1, 1, N, rank + rotary], which begin with the values; so there are no others."""
    return torch.cat([latents, rotary], -1), latents[..., :0]
