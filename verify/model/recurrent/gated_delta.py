"""The gated delta rule over a draft tree, by one triangular solve.

A row removes what its key reads of the decayed state before it writes (Yang et al., arXiv 2412.06464):
u_i = beta_i (v_i - k_i (exp(g_i) S_parent)). Along the paths of a tree these are linear equations in u, with rows in an order
in which parents precede children:

    (I + diag(beta) M) u = beta (v - (exp(c) k) S),    M_ij = k_i . (exp(c_i - c_j) k_j) where j is a proper ancestor of i.
"""

from __future__ import annotations

import torch

from verify.model.recurrent.state import decayed_products


def delta_writes(
    keys: torch.Tensor,  # [..., L, key_dim], of all rows
    values: torch.Tensor,  # [..., N, value_dim], of the last N rows
    beta: torch.Tensor,  # [..., N]
    known: torch.Tensor,  # [..., L - N, value_dim]; u of the rows before
    decays: torch.Tensor,  # [..., L, D]; `path_decays` of all rows
    state: torch.Tensor,  # [..., key_dim, value_dim]
    mask: torch.Tensor,  # bool [N, L]; ancestors of the last N rows, themselves included
) -> torch.Tensor:
    """u of the last N rows, [..., N, value_dim]."""
    before, count = known.shape[-2], values.shape[-2]
    own_keys, own_decays = keys[..., before:, :], decays[..., before:, :]
    missing = values - (own_keys * own_decays.exp()) @ state
    if before:
        reads = decayed_products(own_keys, own_decays, keys[..., :before, :], decays[..., :before, :], mask[:, :before])
        missing = missing - reads @ known
    right = beta[..., None] * missing
    if count == 1:
        return right
    proper = mask[:, before:].tril(-1)
    system = beta[..., None] * decayed_products(own_keys, own_decays, own_keys, own_decays, proper)
    solved: torch.Tensor = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    return solved
