"""Every name makes a drafter that keeps the protocol."""

import numpy as np
import pytest

from drafters.draft import Verdict
from drafters.registry import NAMES, DrafterName, Resources, make, warm


@pytest.mark.parametrize("name", NAMES)
def test_each_keeps_the_protocol(name: DrafterName) -> None:
    drafter = make(name, Resources())
    for _ in range(2):
        drafter.begin(np.array([1, 2, 3, 1, 2], np.int32))
        tree = drafter.propose(16)
        tree.check()
        assert len(tree) <= 16
        drafter.observe(Verdict(tree, np.empty(0, np.int32), np.array([3, 1, 2], np.int32)))
        drafter.propose(16).check()
        drafter.end()


def test_warming_leaves_nothing_behind() -> None:
    warm(Resources())
    drafter = make("trigram", Resources())
    drafter.begin(np.array([0, 1], np.int32))
    assert len(drafter.propose(8)) <= 1
