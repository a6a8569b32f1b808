"""REST's random continuations come from the same matches."""

from __future__ import annotations

import numpy as np

from bench.ablations.rest import RandomRetrieval
from outrider.drafters.registry import Resources
from outrider.drafters.sequence import Sequence
from outrider.drafters.tables import suffix

TEXT = np.array([99, *range(30), 99, 5, 6, 7, *range(40, 60)], np.uint32)
RESOURCES = Resources(corpus=[suffix.index(TEXT, 99)], vocabulary=100)


def test_random_continuations_are_matches_of_eight_tokens() -> None:
    drafter = RandomRetrieval(RESOURCES, np.random.default_rng(0))
    drafter.begin(Sequence(np.array([5, 6, 7], np.int32)))
    tree = drafter.propose(64)
    assert sorted(tree.tokens.tolist()) == [*range(8, 16), *range(40, 48)]  # both matches
