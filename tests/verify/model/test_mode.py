"""A mode decides which segments are computed in one forward, and how many nodes a draft may have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from outrider.drafters.interface import MAX_NODES
from outrider.verify.model.batch import ForwardBatch
from outrider.verify.model.invariant_range import BLOCK, InvariantRange
from outrider.verify.model.mode import MAX_ROWS, Mode
from outrider.verify.model.segment import Segment
from outrider.verify.model.torch_runner import TorchRunner

PLAIN = Mode(in_pages=False, is_recurrent=False)
BOUNDS = InvariantRange(low=4, high=16)


class Backend:
    """A backend that is never called."""

    max_streams, max_rows = 2, 40

    def __call__(self, segments: Sequence[Segment]) -> torch.Tensor:
        raise AssertionError


def segment(runner: TorchRunner, rows: int, logits: bool = True) -> Segment:
    return Segment(runner.new_cache(), ForwardBatch.chain(torch.arange(rows)), logits)


def sizes(mode: Mode, segments: Sequence[Segment]) -> list[list[tuple[int, int]]]:
    """Of each forward, the segments' numbers and the rows that are computed of them."""
    return [[(number, part.rows) for number, part in zip(*each, strict=True)] for each in mode.forwards(segments)]


def test_streams_share_forwards_up_to_the_backends_limits(tiny_runner: TorchRunner) -> None:
    segments = [segment(tiny_runner, rows) for rows in (30, 20, 5, 1)]
    assert sizes(PLAIN, segments) == [[(0, 30), (1, 20), (2, 5), (3, 1)]]
    assert sizes(replace(PLAIN, backend=Backend()), segments) == [[(0, 30), (2, 5)], [(1, 20), (3, 1)]]
    assert (PLAIN.max_rows, replace(PLAIN, backend=Backend()).max_rows) == (MAX_ROWS, 40)


@pytest.mark.parametrize(
    ("mode", "nodes", "depth"),
    [(PLAIN, MAX_NODES, MAX_NODES), (Mode(in_pages=True, is_recurrent=False, bounds=BOUNDS), BOUNDS.high - 1, 3)],
)
def test_drafts_stay_in_the_range(mode: Mode, nodes: int, depth: int) -> None:
    assert (mode.draft_nodes, mode.draft_depth(BLOCK - 4)) == (nodes, depth)
