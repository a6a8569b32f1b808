"""Recurrences over random trees equal the plain recurrence down each path, in float64."""

from __future__ import annotations

import pytest
import torch

from outrider.verify.model.recurrent.convolution import convolve, gather_index
from outrider.verify.model.recurrent.state import advance, scan

HEADS, KEY, VALUE, ROWS = 3, 5, 4, 24


def random_ancestors(rows: int, seed: int) -> torch.Tensor:
    """bool [rows, rows] of a random tree; parents precede children."""
    generator = torch.Generator().manual_seed(seed)
    ancestors = torch.eye(rows, dtype=torch.bool)
    for row in range(1, rows):
        parent = int(torch.randint(max(0, row - 5), row, (1,), generator=generator))
        ancestors[row] |= ancestors[parent]
    return ancestors


class Rows:
    """Random inputs of all rows, float64."""

    def __init__(self, decay_dim: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        self.queries, self.keys = (torch.nn.functional.normalize(normal(HEADS, ROWS, KEY), dim=-1) for _ in range(2))
        self.values, self.state = normal(HEADS, ROWS, VALUE), normal(HEADS, KEY, VALUE)
        self.beta = torch.rand(HEADS, ROWS, generator=generator, dtype=torch.float64)
        self.g = -normal(HEADS, ROWS, decay_dim).abs() * 3

    def recur(self, path: list[int], delta: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """The state after the path and what its last row reads, row by row."""
        state = self.state
        for row in path:
            state = state * self.g[:, row].exp()[:, :, None]
            write = self.values[:, row]
            if delta:
                write = self.beta[:, row, None] * (write - torch.einsum("hk,hkv->hv", self.keys[:, row], state))
            state = state + self.keys[:, row, :, None] * write[:, None]
        return state, torch.einsum("hk,hkv->hv", self.queries[:, path[-1]], state)


def scan_all(rows: Rows, ancestors: torch.Tensor, delta: bool, parts: list[tuple[int, int]]) -> list[torch.Tensor]:
    """u and outputs of all rows, computed in these parts."""
    writes, outputs = rows.values[:, :0], rows.values[:, :0]
    for first, end in parts:
        mask = torch.zeros(end - first, end, dtype=torch.float64).masked_fill(~ancestors[first:end, :end], -torch.inf)
        beta = rows.beta[:, first:end] if delta else None
        own = rows.queries[:, first:end], rows.keys[:, :end], rows.values[:, first:end], beta
        found, read = scan(*own, writes, rows.g[:, :end], rows.state, ancestors[:end, :end].double(), mask)
        writes, outputs = torch.cat([writes, found], 1), torch.cat([outputs, read], 1)
    return [writes, outputs]


@pytest.mark.parametrize("decay_dim", [1, KEY])
@pytest.mark.parametrize("delta", [True, False])
@pytest.mark.parametrize("known", [0, 1, 7])
def test_trees_equal_their_paths(decay_dim: int, delta: bool, known: int) -> None:
    """In one call and in two, as a draft model expands its tree."""
    rows, ancestors = Rows(decay_dim, known), random_ancestors(ROWS, known)
    parts = [(first, end) for first, end in ((0, known), (known, ROWS)) if first < end]
    writes, outputs = scan_all(rows, ancestors, delta, parts)
    for row in range(ROWS):
        path = ancestors[row].nonzero()[:, 0].tolist()
        state, output = rows.recur(path, delta)
        assert torch.allclose(outputs[:, row], output, atol=1e-12, rtol=0)
        committed = rows.state.clone()
        advance(committed, rows.keys[:, path], writes[:, path], rows.g[:, path])
        assert torch.allclose(committed, state, atol=1e-12, rtol=0)


@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize("known", [0, 1, 7])
def test_convolutions_of_trees_equal_those_of_their_paths(window: int, known: int) -> None:
    generator = torch.Generator().manual_seed(window)
    inputs, weight = (torch.randn(rows, 6, generator=generator, dtype=torch.float64) for rows in (window + ROWS, window + 1))
    bias, ancestors = torch.randn(6, generator=generator, dtype=torch.float64), random_ancestors(ROWS, known)
    found = convolve(inputs, gather_index(ancestors, known, window), weight, bias)
    for row in range(known, ROWS):
        path = [*range(window), *(ancestors[row].nonzero()[:, 0] + window).tolist()]
        last = (inputs[path][-window - 1 :] * weight).sum(0) + bias
        assert torch.allclose(found[row - known], last, atol=1e-12)
