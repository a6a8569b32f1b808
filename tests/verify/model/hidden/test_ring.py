"""States by position: what was written last is read, as far as it is kept."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.verify.model.hidden.ring import StateRing

CAPACITY = 7


def states(start: int, count: int) -> torch.Tensor:
    return torch.arange(start + 1, start + count + 1, dtype=torch.float32)[:, None]


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 12), st.integers(0, 30)), min_size=1, max_size=8))
def test_kept_states_are_those_written_last(steps: list[tuple[int, int, int]]) -> None:
    ring = StateRing(CAPACITY, 1, torch.float32, torch.device("cpu"))
    for start, count, length in steps:
        ring.write(start, states(start, count))
        assert ring.end == start + count and ring.end - ring.first <= CAPACITY
        ring.truncate(length)
        found = ring.read(-1, 45)[:, 0].tolist()
        assert found == [at + 1 if ring.first <= at < ring.end else 0 for at in range(-1, 45)]


def test_a_commit_moves_the_rows_of_the_accepted_path() -> None:
    ring = StateRing(CAPACITY, 1, torch.float32, torch.device("cpu"))
    ring.write(0, states(0, 4))
    ring.write(4, states(4, 5))
    ring.commit(4, [0, 2, 3])
    assert (ring.first, ring.end) == (2, 7)
    assert ring.read(2, 8)[:, 0].tolist() == [3, 4, 5, 7, 8, 0]
    assert ring.take(torch.tensor([6, 4]))[:, 0].tolist() == [8, 5]
