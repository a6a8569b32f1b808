"""Linear recurrences over a draft tree: every row's output in a few matrix products, without a state per row.

A row j writes the vector u_j under the key k_j after the state has decayed by exp(g_j). So the state after a row i is

    S_i = exp(c_i) S + sum over j on the path to i of (exp(c_i - c_j) k_j) u_j^T,    c = the sum of g along the path,

and a step keeps k, u and g of its rows instead of states. Decays are per head (D = 1) or per key channel (D = key_dim).
Layouts: keys [H, L, key_dim], values and u [H, L, value_dim], g [H, L, D], states [H, key_dim, value_dim].
A short causal convolution gathers each row's last ancestors, or the committed window before them. Knows nothing about models or
caches.
"""

from __future__ import annotations

import torch


def path_decays(g: torch.Tensor, ancestors: torch.Tensor) -> torch.Tensor:
    """The sum of g [H, L, D] along the path to each row, itself included; `ancestors` is [L, L], ones and zeros."""
    return torch.matmul(g.transpose(1, 2), ancestors.t()).transpose(1, 2)


def scan(
    queries: torch.Tensor,  # [H, N, key_dim], of the last N rows
    keys: torch.Tensor,  # [H, L, key_dim], of all rows
    values: torch.Tensor,  # [H, N, value_dim]
    beta: torch.Tensor | None,  # [H, N] for the gated delta rule; None = values are written as they are
    known: torch.Tensor,  # [H, L - N, value_dim]; u of the rows before
    g: torch.Tensor,  # [H, L, D]
    state: torch.Tensor,  # [H, key_dim, value_dim]
    ancestors: torch.Tensor,  # [L, L] of ones and zeros
    mask: torch.Tensor,  # [N, L]; 0 where a row has an ancestor or itself, else -inf
) -> tuple[torch.Tensor, torch.Tensor]:
    """u of the last N rows, and what they read of the states after them, q_i S_i; both [H, N, value_dim].

    For the gated delta rule (Yang et al., arXiv 2412.06464), a row removes what its key reads of the decayed state before it
    writes: u_i = beta_i (v_i - k_i (exp(g_i) S_parent)). Along the paths of a tree these are linear equations in u, with rows
    in an order in which parents precede children:

        (I + diag(beta) M) u = beta (v - (exp(c) k) S),    M_ij = k_i . (exp(c_i - c_j) k_j) where j is a proper ancestor of i.
    """
    count, first = queries.size(1), keys.size(1) - queries.size(1)
    # The queries and the keys of the rows read the state together, so it is loaded once.
    readers = queries if beta is None else torch.cat([queries, keys[:, first:]], 1)
    from_state, products = reads(readers, keys, path_decays(g, ancestors), state, mask)
    writes = values
    if beta is not None:
        writes = values - from_state[:, count:]
        if first > 0:
            writes.baddbmm_(products[:, count:, :first], known, alpha=-1.0)
        writes.mul_(beta.unsqueeze(-1))
        if count > 1:  # the diagonal and what is above it are not read; transposed, because the solver works by columns
            system = (products[:, count:, first:] * beta.unsqueeze(-1)).transpose(1, 2)
            solved = torch.linalg.solve_triangular(system, writes.transpose(1, 2), upper=True, left=False, unitriangular=True)
            writes = solved.transpose(1, 2)
    written = torch.cat([known, writes], 1) if first > 0 else writes
    return writes, torch.baddbmm(from_state[:, :count], products[:, :count], written)


def reads(
    readers: torch.Tensor,  # [H, R * N, key_dim]; vectors of the last N rows, one after the other, R times
    keys: torch.Tensor,  # [H, L, key_dim]
    decays: torch.Tensor,  # [H, L, D]; `path_decays`
    state: torch.Tensor,
    mask: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reads the decayed state, [H, R * N, value_dim], and each row's key, [H, R * N, L], for each vector."""
    heads, count, width = readers.size(0), mask.size(0), keys.size(2)
    own = decays[:, decays.size(1) - count :]
    if decays.size(2) == 1:
        weights = (own - decays.transpose(1, 2) + mask).exp().unsqueeze(1)
        from_state = torch.bmm(readers, state).view(heads, -1, count, state.size(2)).mul_(own.exp().unsqueeze(1))
        products = torch.bmm(readers, keys.transpose(1, 2)).view(heads, -1, count, keys.size(1)).mul_(weights)
    else:
        weights = (own.unsqueeze(2) - decays.unsqueeze(1) + mask.unsqueeze(-1)).exp() * keys.unsqueeze(1)
        rows = readers.view(heads, -1, count, width)
        from_state = torch.bmm((rows * own.exp().unsqueeze(1)).flatten(1, 2), state).unsqueeze(1)
        products = (rows.unsqueeze(3) * weights.unsqueeze(1)).sum(-1)
    return from_state.flatten(1, 2), products.flatten(1, 2)


def advance(state: torch.Tensor, keys: torch.Tensor, writes: torch.Tensor, g: torch.Tensor) -> None:
    """Replaces the state [H, key_dim, value_dim] by the one after a chain of rows."""
    decays = g.cumsum(1)
    last = decays[:, -1:]
    weighted = (keys * (last - decays).exp()).transpose(1, 2)
    state.mul_(last.exp().transpose(1, 2)).baddbmm_(weighted, writes)


def gather_index(ancestors: torch.Tensor, first: int, window: int) -> torch.Tensor:
    """Indices of the inputs of rows from `first` on, in the window followed by all rows, int64 [N, window + 1].

    `ancestors` is bool [L, L] with parents before children; the inputs are in the order of the text, the row's own last.
    """
    own = ancestors[first:]
    order = torch.arange(ancestors.shape[1], device=own.device)
    steps = torch.arange(window + 1, device=own.device)  # back from the row
    ranked = torch.where(own, order, -1).sort(-1, descending=True).values
    found = torch.nn.functional.pad(ranked, (0, max(0, window + 1 - ranked.shape[1])), value=-1)[:, : window + 1]
    depth = own.sum(-1, keepdim=True)
    return torch.where(found >= 0, found + window, window + depth - 1 - steps).flip(-1)


def convolve(
    inputs: torch.Tensor,  # [window + L, channels]
    index: torch.Tensor,  # `gather_index`
    taps: torch.Tensor,  # [window + 1, channels], contiguous; the weights
    bias: torch.Tensor | None,  # [channels]
) -> torch.Tensor:
    """The convolution's outputs, [N, channels], with the dtype of the weights."""
    inputs = inputs.to(taps.dtype)
    if inputs.size(0) > taps.size(0):  # a row alone reads all of them
        inputs = inputs.index_select(0, index.flatten())
    gathered = inputs.view(index.size(0), taps.size(0), taps.size(1))
    out = gathered[:, 0] * taps[0]
    for place in range(1, taps.size(0)):
        out.addcmul_(gathered[:, place], taps[place])
    return out if bias is None else out.add_(bias)
