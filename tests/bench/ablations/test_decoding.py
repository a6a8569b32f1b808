"""The papers' figures of hand-made steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bench.ablations.decoding import Decoding
from outrider.drafters.interface import DraftTree, Source, arrange
from outrider.verify.stream import Step

#        1 - 2 - 3
# root <
#        4 - 2 - 3, merged
TREE, _ = arrange([1, 4, 2, 2, 3, 3], [-1, -1, 0, 1, 2, 3], [0.5, 0.4, 0.4, 0.3, 0.3, 0.2], [Source.DRAFT] * 6)
TREE = replace(TREE, source=np.array([Source.DRAFT] * 4 + [Source.MERGED] * 2, np.uint8))


def step(tree: DraftTree, *rows: int) -> Step:
    return Step([9] * (len(rows) + 1), tree=tree, path=np.array(rows, np.int32), draft_seconds=0.25)


DECODING = Decoding(answers=1, tokens=6, steps=[step(TREE, 0, 1), step(TREE, 3, 4)], seconds=2.0)


def test_acceptance_speed_and_merged_nodes() -> None:
    assert (DECODING.tokens_per_step, DECODING.tokens_per_second, DECODING.accepted) == (3.0, 3.0, 4)
    assert DECODING.acceptance == pytest.approx(4 / 6)
    assert DECODING.graph_success == 0.5
    assert DECODING.milliseconds("draft") == 250.0


def test_ranks_are_those_among_siblings() -> None:
    assert TREE.tokens.tolist() == [1, 2, 3, 4, 2, 3]
    assert DECODING.ranks() == {0: 3, 1: 1}
