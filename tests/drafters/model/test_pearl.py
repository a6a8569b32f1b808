"""PEARL's loop: background drafting, pre-verify, post-verify and cancellation."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from outrider.drafters.interface import Ints, Verdict
from outrider.drafters.model.chain import ModelChain
from outrider.drafters.model.language_model import Candidates
from outrider.drafters.model.schedule import Schedules
from outrider.drafters.model.union import UnionDrafter
from outrider.drafters.none import NoDrafter
from outrider.drafters.options import PearlOptions
from tests.drafters.model.test_draft_tree import PROMPT
from tests.drafts import Driven
from tests.language import ToyModel
from tests.trees import check

RING = np.full((5, 5), 0.01) + np.roll(np.eye(5), 1, 1)  # 0 -> 1 -> 2 -> 3 -> 4 -> 0
RING /= RING.sum(1, keepdims=True)


def new(options: PearlOptions, model: ToyModel | None = None) -> tuple[Driven, ToyModel, ModelChain]:
    chain = ModelChain(model := model or ToyModel(RING), options)
    drafter = Driven(UnionDrafter(NoDrafter(), chain, Schedules(), 4, "during"))
    drafter.begin(PROMPT)  # ends with 0
    return drafter, model, chain


def step(drafter: Driven, *tokens: int) -> list[int]:
    """Proposes, then emits `tokens`; returns the proposed tokens."""
    tree = drafter.propose(64)
    check(tree)
    drafter.observe(Verdict(tree, np.empty(0, np.int32), np.array(tokens, np.int32), seconds=0.01))
    return list(map(int, tree.tokens))


def test_draft_tokens_are_verified_while_others_are_drafted() -> None:
    drafter, model, _ = new(PearlOptions(window=3, ahead=0))
    assert step(drafter, 1) == []  # pre-verify: the target's own token checks the first draft token
    assert step(drafter, 2, 3, 4) == [2, 3]  # post-verify: 4, 0, 1 are drafted during this step
    assert step(drafter, 0, 1, 2) == [0, 1]
    assert model.forwards == [1] * 9


def test_a_rejection_discards_the_draft() -> None:
    drafter, *_ = new(PearlOptions(window=3, ahead=0))
    step(drafter, 1)
    assert step(drafter, 2, 0) == [2, 3]  # 3 was rejected
    assert step(drafter, 3) == []  # after 0, 1 was drafted and is rejected
    assert step(drafter, 4) == []
    assert step(drafter, 0) == [0, 1]


def test_a_table_drafts_for_the_draft_model() -> None:
    """The draft is the same in fewer forwards, also where the table is wrong."""
    plain, quick = new(PearlOptions(window=6, ahead=0)), new(PearlOptions(window=6, ahead=3))
    misled: Ints = np.array([0, 1, 2, 0, 1, 4, 0], np.int32)  # the text has 1, 4; the model prefers 1, 2
    for drafter, *_ in (plain, quick):
        drafter.begin(misled)
    last = 0
    for _ in range(10):  # the target agrees with the model every time
        size = len(plain[2]) + 1
        emitted = [(last + 1 + number) % 5 for number in range(size)]
        last = emitted[-1]
        assert step(plain[0], *emitted) == step(quick[0], *emitted)
        assert plain[2].tokens == quick[2].tokens
    assert sum(quick[1].forwards) > len(quick[1].forwards)
    assert len(quick[1].forwards) < len(plain[1].forwards)


@pytest.mark.parametrize("tokens", [[1], [2]])
def test_a_cancelled_request_leaves_nothing_running(tokens: list[int]) -> None:
    with ThreadPoolExecutor(1) as thread:
        drafter, *_ = new(PearlOptions(window=20), ToyModel(RING, thread=thread))
        drafter.propose(64)
        drafter.end()
        again: Ints = np.array([3, 0, *tokens], np.int32)
        drafter.begin(again)
        assert drafter.propose(64).tokens.tolist() == []
        drafter.end()


class Failing(ToyModel):
    """A draft model whose forwards fail while `broken`."""

    broken = True

    def root(self, count: int) -> Candidates:
        if self.broken:
            raise RuntimeError("out of memory")
        return super().root(count)


def test_a_failed_draft_is_reported_once() -> None:
    with ThreadPoolExecutor(1) as thread:
        drafter, *_ = new(PearlOptions(window=3, ahead=0), Failing(RING, thread=thread))
        with pytest.raises(RuntimeError, match="out of memory"):
            step(drafter, 1)
        drafter.end()
        drafter.begin(PROMPT)
        drafter.end()
