"""vLLM's proposer, with rows as vLLM passes them: requests begin, move between rows and end, some at once."""

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.drafters.interface import Ints
from outrider.engines.vllm import Proposer
from tests.engines.test_sglang import text

VOCABULARY, LENGTH, MAX_TOKENS = 50, 6, 90


def config(length: int = LENGTH) -> Any:
    """The part of a VllmConfig that the proposer reads."""
    model = SimpleNamespace(get_vocab_size=lambda: VOCABULARY, max_model_len=MAX_TOKENS)
    return SimpleNamespace(model_config=model, speculative_config=SimpleNamespace(num_speculative_tokens=length))


class Batch:
    """The rows of vLLM's batch, and requests whose answers are known."""

    def __init__(self) -> None:
        self.tokens = np.zeros((8, MAX_TOKENS), np.int32)
        self.sizes = np.zeros(8, np.int32)
        self.answers: list[Ints] = []  # what is left of each row's answer
        self.sampled: list[list[int]] = []

    def add(self, prompt: Ints, answer: Ints) -> None:
        row = len(self.answers)
        self.tokens[row, : len(prompt)], self.sizes[row] = prompt, len(prompt)
        self.answers.append(answer)
        self._emit(row, 1)

    def remove(self, row: int) -> None:
        """The last row takes its place, as in vLLM."""
        last = len(self.answers) - 1
        self.tokens[row], self.sizes[row] = self.tokens[last], self.sizes[last]
        self.answers[row], self.sampled[row] = self.answers[last], self.sampled[last]
        del self.answers[last], self.sampled[last]

    def step(self, proposer: Proposer) -> list[list[int]]:
        """Proposes, and accepts what the answers begin with; returns the drafts."""
        drafts = proposer.propose(self.sampled, self.sizes, self.tokens, slot_mappings=None)
        for row, draft in enumerate(drafts):
            rest = self.answers[row]
            accepted = 0
            while accepted < min(len(draft), len(rest) - 1) and draft[accepted] == rest[accepted]:
                accepted += 1
            self._emit(row, accepted + 1)
        return drafts

    def _emit(self, row: int, count: int) -> None:
        tokens, self.answers[row] = self.answers[row][:count], self.answers[row][count:]
        self.tokens[row, self.sizes[row] : self.sizes[row] + len(tokens)] = tokens
        self.sizes[row] += len(tokens)
        self.sampled[row : row + 1] = [tokens.tolist()]


def test_a_request_is_drafted_and_leaves_no_session() -> None:
    proposer, batch = Proposer(config()), Batch()
    batch.add(text(1, 20), text(1, 38)[20:])  # the answer continues the prompt
    steps = 0
    while len(batch.answers[0]):
        assert all(len(draft) <= LENGTH for draft in batch.step(proposer))
        steps += 1
    assert steps < 10
    session = weakref.ref(next(iter(proposer.sessions.values())))
    batch.remove(0)
    batch.add(text(2, 10), text(3, 30))
    batch.step(proposer)
    gc.collect()
    assert session() is None and len(proposer.sessions) == 1


@given(st.lists(st.tuples(st.sampled_from(["add", "remove", "step"]), st.integers(0, 7)), max_size=30))
def test_each_request_keeps_its_session_while_rows_move(actions: list[tuple[str, int]]) -> None:
    proposer, batch = PROPOSER, Batch()
    proposer.propose([], batch.sizes, batch.tokens)
    made = 0
    for number, (action, row) in enumerate(actions):
        if action == "add" and len(batch.answers) < 8:
            # Each prompt begins with its own tokens, so no text continues another one.
            batch.add(np.array([*divmod(number, 40), *text(number, 18)], np.int32), text(number + 50, 30))
            made += 1
        elif action == "remove" and row < len(batch.answers):
            batch.remove(row)
        elif action == "step" and all(len(answer) for answer in batch.answers):
            before = {id(session) for session in proposer.sessions.values()}
            batch.step(proposer)
            assert sorted(proposer.sessions) == list(range(len(batch.answers)))
            assert len({id(session) for session in proposer.sessions.values()} - before) <= made
            made = 0


def test_parts_of_prompts_get_no_draft_and_no_session() -> None:
    proposer, batch = Proposer(config()), Batch()
    batch.add(text(1, 20), text(1, 40)[20:])
    batch.add(text(2, 20), text(2, 40)[20:])
    batch.sampled[0] = []
    drafts = proposer.propose(batch.sampled, batch.sizes, batch.tokens)
    assert drafts[0] == [] and drafts[1]
    assert list(proposer.sessions) == [1]


@pytest.mark.parametrize(("learned", "drafted"), [(1 << 16, True), (0, False)])
def test_later_requests_draft_from_earlier_answers(learned: int, drafted: bool) -> None:
    class Bounded(Proposer):
        learned_tokens = learned
        least = 0.01

    proposer, batch = Bounded(config()), Batch()
    batch.add(np.arange(3, 9, dtype=np.int32), np.arange(9, 45, dtype=np.int32))
    while len(batch.answers[0]):
        batch.step(proposer)
    batch.remove(0)
    proposer.propose([], batch.sizes, batch.tokens)
    batch.add(np.arange(15, 20, dtype=np.int32), np.arange(20, 40, dtype=np.int32))
    assert (batch.step(proposer)[0][:2] == [21, 22]) is drafted


def test_no_draft_is_longer_than_the_model_admits() -> None:
    proposer, batch = Proposer(config()), Batch()
    batch.add(text(1, MAX_TOKENS - 4), text(1, MAX_TOKENS - 3)[-1:])
    assert len(batch.step(proposer)[0]) <= 2


PROPOSER = Proposer(config())
