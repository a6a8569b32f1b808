"""ADED as a drafter: it learns within a session only."""

import numpy as np
import pytest

from outrider.drafters.interface import EMPTY, Verdict
from outrider.drafters.options import TrigramOptions
from outrider.drafters.tables import base_table
from outrider.drafters.trigram import TrigramDrafter
from tests.drafts import Driven

NONE = np.empty(0, np.int32)
PHRASE = np.array([11, 12, 13, 14, 15], np.int32)


@pytest.fixture(params=["mcts", "best-first"])
def options(request: pytest.FixtureRequest) -> TrigramOptions:
    return TrigramOptions(search=request.param)


def test_emitted_tokens_are_learned(options: TrigramOptions) -> None:
    drafter = Driven(TrigramDrafter(base_table.empty_base(), options))
    drafter.begin(np.array([1], np.int32))
    assert len(drafter.propose(16)) == 0
    drafter.observe(Verdict(EMPTY, NONE, PHRASE))
    drafter.observe(Verdict(EMPTY, NONE, PHRASE[:2]))
    tree = drafter.propose(16)
    assert tree.tokens[0] == 13


def test_what_is_learned_stays_in_the_session(options: TrigramOptions) -> None:
    base = base_table.empty_base()
    first, second = Driven(TrigramDrafter(base, options)), Driven(TrigramDrafter(base, options))
    first.begin(PHRASE)
    first.end()
    for drafter, expected in ((first, [13]), (second, [])):
        drafter.begin(PHRASE[:2])
        assert drafter.propose(16).tokens[:1].tolist() == expected
