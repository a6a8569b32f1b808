"""Linear recurrences over a draft tree: every row's output in a few matrix products, without a state per row.

A row j writes the vector u_j under the key k_j after the state has decayed by exp(g_j). So the state after a row i is

    S_i = exp(c_i) S + sum over j on the path to i of (exp(c_i - c_j) k_j) u_j^T,    c = the sum of g along the path,

and a step keeps k, u and g of its rows instead of states. Decays are per head (D = 1) or per key channel (D = key_dim).
Layouts: keys [..., H, L, key_dim], values and u [..., H, L, value_dim], g [..., H, L, D], states [..., H, key_dim, value_dim].
Knows nothing about models or caches.
"""

from __future__ import annotations

import torch


def path_decays(g: torch.Tensor, ancestors: torch.Tensor) -> torch.Tensor:
    """The sum of g [..., L, D] along the path to each row, itself included; `ancestors` is bool [L, L]."""
    return ancestors.to(g.dtype) @ g


def decayed_products(
    rows: torch.Tensor,  # [..., N, key_dim]
    row_decays: torch.Tensor,  # [..., N, D]; `path_decays` of the rows
    keys: torch.Tensor,  # [..., L, key_dim]
    key_decays: torch.Tensor,  # [..., L, D]
    mask: torch.Tensor,  # bool [N, L]
) -> torch.Tensor:
    """What each row reads of each key: row_i . (exp(c_i - c_j) k_j) where the mask is set, else 0; [..., N, L]."""
    if row_decays.shape[-1] == 1:
        weights = (row_decays - key_decays.transpose(-1, -2)).masked_fill(~mask, -torch.inf).exp()
        return (rows @ keys.transpose(-1, -2)) * weights
    exponents = row_decays[..., :, None, :] - key_decays[..., None, :, :]
    weights = exponents.masked_fill(~mask[..., None], -torch.inf).exp()
    return (rows[..., :, None, :] * keys[..., None, :, :] * weights).sum(-1)


def read(
    queries: torch.Tensor,  # [..., N, key_dim], of the last N rows
    keys: torch.Tensor,  # [..., L, key_dim], of all rows
    writes: torch.Tensor,  # [..., L, value_dim]; u
    decays: torch.Tensor,  # [..., L, D]; `path_decays` of all rows
    state: torch.Tensor,  # [..., key_dim, value_dim]
    mask: torch.Tensor,  # bool [N, L]; ancestors of the last N rows
) -> torch.Tensor:
    """What each of the last N rows reads of the state after it: q_i S_i, [..., N, value_dim]."""
    own = decays[..., -queries.shape[-2] :, :]
    return (queries * own.exp()) @ state + decayed_products(queries, own, keys, decays, mask) @ writes


def advance(state: torch.Tensor, keys: torch.Tensor, writes: torch.Tensor, g: torch.Tensor) -> None:
    """Replaces the state by the one after a chain of rows. All leading dimensions are the same, and the state is contiguous."""
    decays = g.cumsum(-2)
    last = decays[..., -1:, :]
    weighted = (keys * (last - decays).exp()).transpose(-1, -2)
    state.mul_(last.exp().transpose(-1, -2))
    state.view(-1, *state.shape[-2:]).baddbmm_(weighted.flatten(0, -3), writes.flatten(0, -3))
