"""A mode decides which segments are computed in one forward, and how many nodes a draft may have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from outrider.drafters.interface import MAX_NODES
from outrider.verify.model.batch import ForwardBatch
from outrider.verify.model.cpu.ordered_attention import AttentionInputs
from outrider.verify.model.invariant_range import BLOCK, InvariantRange
from outrider.verify.model.mode import MAX_ROWS, Mode
from outrider.verify.model.segment import Segment
from outrider.verify.model.torch_runner import TorchRunner

PLAIN = Mode(in_pages=False, is_recurrent=False)
BOUNDS = InvariantRange(low=4, high=16, queries=4)


class Backend:
    """A backend that is never called."""

    max_streams, max_rows = 2, 40
    reads_prompts = is_invariant = False

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


def test_in_a_range_segments_are_cut_and_padded(tiny_runner: TorchRunner) -> None:
    inputs = AttentionInputs(2, 8, 2, torch.float32, BOUNDS)
    mode = replace(PLAIN, bounds=BOUNDS, inputs=inputs)
    assert sizes(mode, [segment(tiny_runner, 20), segment(tiny_runner, 3)]) == [[(0, 16)], [(0, 4), (1, 3)]]
    short = [segment(tiny_runner, 1), segment(tiny_runner, 2)]
    assert [each.batch.padding for each in mode.padded(short)] == [0, 1]
    assert PLAIN.padded(short) is short
    chunk = segment(tiny_runner, 20, logits=False)
    assert sizes(mode, [chunk, segment(tiny_runner, 3)]) == [[(0, 20)], [(1, 3)]]  # the range has no room for prompts


@pytest.mark.parametrize(
    ("mode", "nodes", "depth"),
    [
        (PLAIN, MAX_NODES, MAX_NODES),
        (replace(PLAIN, bounds=BOUNDS), MAX_NODES, 3),  # a CPU computes further rows in another forward
        (Mode(in_pages=True, is_recurrent=False, bounds=BOUNDS), BOUNDS.high - 1, 3),
    ],
)
def test_drafts_stay_in_the_range(mode: Mode, nodes: int, depth: int) -> None:
    assert (mode.draft_nodes, mode.draft_depth(BLOCK - 4)) == (nodes, depth)


def test_a_backend_without_prompts_leaves_chunks_to_the_untraced_forward(tiny_runner: TorchRunner) -> None:
    mode = replace(PLAIN, backend=Backend())
    step, chunk = segment(tiny_runner, 3), segment(tiny_runner, 3, logits=False)
    assert [mode.is_untraced_chunk(each) for each in (step, chunk)] == [False, True]
    assert mode.backend_for([step, chunk]) is mode.backend
    assert replace(mode, is_recurrent=True).backend_for([step, chunk]) is None
    assert replace(mode, is_recurrent=True).backend_for([step]) is mode.backend
