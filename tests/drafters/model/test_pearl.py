"""PEARL's loop: background drafting, pre-verify, post-verify and cancellation."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from outrider.drafters.interface import Drafter, Ints, Verdict
from outrider.drafters.model.chain import ModelChain
from outrider.drafters.model.language_model import Candidates
from outrider.drafters.model.pair import Pair
from outrider.drafters.model.union import UnionDrafter
from outrider.drafters.none import NoDrafter
from tests.drafters.model.test_union import PROMPT, RING
from tests.drafts import Driven
from tests.language import ToyModel
from tests.trees import check


def new(window: int, model: ToyModel | None = None, tables: Drafter | None = None) -> tuple[Driven, ToyModel, ModelChain]:
    chain = ModelChain(model := model or ToyModel(RING), Pair(), window=window)
    drafter = Driven(UnionDrafter(tables or NoDrafter(), chain, Pair(), 4, "during", only_if_worth=False))
    drafter.begin(PROMPT)  # ends with 0
    return drafter, model, chain


def step(drafter: Driven, *tokens: int) -> list[int]:
    """Proposes, then emits `tokens`; returns the proposed tokens."""
    tree = drafter.propose(64)
    check(tree)
    drafter.observe(Verdict(tree, np.empty(0, np.int32), np.array(tokens, np.int32), seconds=0.01))
    return list(map(int, tree.tokens))


def test_draft_tokens_are_verified_while_others_are_drafted() -> None:
    drafter, model, _ = new(3)
    assert step(drafter, 1) == []  # pre-verify: the target's own token checks the first draft token
    assert step(drafter, 2, 3, 4) == [2, 3]  # post-verify: 4, 0, 1 are drafted during this step
    assert step(drafter, 0, 1, 2) == [0, 1]
    assert model.forwards == [1] * 9


def test_a_rejection_discards_the_draft() -> None:
    drafter, *_ = new(3)
    step(drafter, 1)
    assert step(drafter, 2, 0) == [2, 3]  # 3 was rejected
    assert step(drafter, 3) == []  # after 0, 1 was drafted and is rejected
    assert step(drafter, 4) == []
    assert step(drafter, 0) == [0, 1]


@pytest.mark.parametrize("tokens", [[1], [2]])
def test_a_cancelled_request_leaves_nothing_running(tokens: list[int]) -> None:
    with ThreadPoolExecutor(1) as thread:
        drafter, *_ = new(20, ToyModel(RING, thread=thread))
        drafter.propose(64)
        drafter.end()
        again: Ints = np.array([*PROMPT, *tokens], np.int32)
        drafter.begin(again)
        assert drafter.propose(64).tokens.tolist() == []
        drafter.end()


class Failing(ToyModel):
    """A draft model whose forwards fail."""

    def root(self, count: int) -> Candidates:
        raise RuntimeError("out of memory")


def test_a_failed_draft_is_reported_once_and_ends_its_request_only() -> None:
    with ThreadPoolExecutor(1) as thread:
        drafter, *_ = new(3, Failing(RING, thread=thread))
        with pytest.raises(RuntimeError, match="out of memory"):
            step(drafter, 1)
        drafter.end()
        drafter.begin(PROMPT)
        drafter.propose(64)
        drafter.end()  # cancelled: the failure affects no answer
