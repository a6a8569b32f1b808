"""Every name creates a drafter that implements the protocol."""

import numpy as np
import pytest

from outrider.drafters.interface import Verdict
from outrider.drafters.options import NAMES, DrafterName
from outrider.drafters.registry import Resources, make
from tests.drafts import Driven
from tests.language import ToyModel
from tests.trees import check

RESOURCES = Resources(model=lambda: ToyModel(np.full((8, 8), 1 / 8)))


@pytest.mark.parametrize("name", NAMES)
def test_each_drafter_implements_the_protocol(name: DrafterName) -> None:
    drafter = Driven(make(name, RESOURCES))
    for _ in range(2):
        drafter.begin(np.array([1, 2, 3, 1, 2], np.int32))
        tree = drafter.propose(16)
        check(tree)
        assert len(tree) <= 16
        drafter.observe(Verdict(tree, np.empty(0, np.int32), np.array([3, 1, 2], np.int32)))
        check(drafter.propose(16))
        drafter.end()


def test_drafters_that_need_a_model_are_listed_only_with_one() -> None:
    assert set(NAMES) - set(Resources().names) == {"draft", "draft-tree", "draft-graph", "pearl"}
    assert RESOURCES.names == NAMES
