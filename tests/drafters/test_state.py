"""A drafter that was saved and restored, or copied for a fork, goes on exactly as the original; no state is forgotten."""

import copy
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from outrider.drafters import registry
from outrider.drafters.interface import Drafter, DraftTree, Ints, Verdict
from outrider.drafters.model.pair import Pair
from outrider.drafters.options import NAMES, DrafterName, FusionOptions, Options, PearlOptions
from outrider.drafters.registry import Resources, arrays_of, load, make
from outrider.drafters.sequence import Sequence
from outrider.drafters.state import StateError
from outrider.drafters.tables.suffix import index
from tests.language import ToyModel
from tests.trees import check

VOCABULARY = 32
RANDOM = np.random.default_rng(5)
TEXT = np.tile(RANDOM.integers(0, VOCABULARY, 40), 3).astype(np.int32)
OTHER = RANDOM.integers(0, VOCABULARY, 60).astype(np.int32)
TABLE = RANDOM.dirichlet(np.full(VOCABULARY, 0.05), VOCABULARY) + 1e-9
CASES: dict[str, tuple[DrafterName, Options]] = {
    **{name: (name, Options(fusion=FusionOptions(draft="never"))) for name in NAMES},
    "fusion, with a draft model": ("fusion", Options(fusion=FusionOptions(draft="before"))),
    "pearl, alone": ("pearl", Options(pearl=PearlOptions(only_if_worth=False))),
}


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time passes by calls, so that what is measured is the same each time, to the last bit."""
    calls = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: next(calls) / 1024)


@dataclass
class Session:
    """A drafter and its text; also what all sessions share, such as what they measured of the draft model."""

    name: DrafterName
    resources: Resources
    drafter: Drafter
    text: Sequence

    def request(self, prompt: Ints, tokens: Ints) -> list[list[list[int]]]:
        """Answers one request with `tokens` and what is drafted; returns the drafts."""
        self.begin(prompt)
        trees = [step(self.drafter, self.text, int(token)) for token in tokens]
        self.drafter.end()
        return [[tree.tokens.tolist(), tree.parents.tolist()] for tree in trees]

    def begin(self, prompt: Ints) -> None:
        self.text.begin(prompt)
        self.drafter.begin(self.text)


def step(drafter: Drafter, sequence: Sequence, token: int) -> DraftTree:
    """One step, in which the target accepts the likeliest path, then chooses `token`; without a draft, the model's choice."""
    tree = drafter.propose(12)
    check(tree)
    assert len(tree) <= 12
    accepted = tree.likeliest(())
    token = token if len(tree) else int(TABLE[sequence.tokens[-1]].argmax())
    rows = tree.follow(np.array(accepted, np.int32))
    ids = np.arange((len(tree) + 1) * drafter.feedback, dtype=np.int32).reshape(len(tree) + 1, drafter.feedback) % VOCABULARY
    tokens = np.array([*accepted, token], np.int32)
    sequence.append(tokens)
    drafter.observe(Verdict(tree, rows, tokens, ids, np.full(ids.shape, 0.1, np.float32), 0.01))
    return tree


def learned(case: str) -> Session:
    """A session after two requests, of which the second one leaves the text of the first. Each call returns the same."""
    name, options = CASES[case]
    corpus = (index(TEXT.astype(np.int64), VOCABULARY),)
    pair = Pair(target_seconds=1.0)
    resources = Resources(options, corpus=corpus, vocabulary=VOCABULARY, model=lambda: ToyModel(TABLE), pair=pair)
    session = Session(name, resources, make(name, resources), Sequence())
    session.request(TEXT, TEXT[:6])
    session.request(np.concatenate([TEXT[:50], OTHER]), TEXT[:3])
    return session


def saved_and_restored(session: Session) -> Session:
    saved = {name: array.copy() for name, array in arrays_of(session.drafter).items()}
    text = Sequence(session.text.tokens.copy())
    return replace(session, drafter=load(session.name, session.resources, saved, text), text=text)


def forked(session: Session) -> Session:
    memo: dict[int, Any] = {}
    text = copy.deepcopy(session.text, memo)
    return replace(session, drafter=copy.deepcopy(session.drafter, memo), text=text)


Copy = Callable[[Session], Session]


@pytest.mark.parametrize("copied", [saved_and_restored, forked])
@pytest.mark.parametrize("case", CASES)
def test_a_copy_drafts_as_the_original(case: str, copied: Copy) -> None:
    original, other = learned(case), copied(learned(case))
    prompts = [np.concatenate([original.text.tokens[:-2], OTHER[:5], TEXT[:9]]), TEXT[:70]]
    drafts = [original.request(prompt, TEXT[9:15]) for prompt in prompts]
    assert [other.request(prompt, TEXT[9:15]) for prompt in prompts] == drafts
    assert any(tokens for draft in drafts for tokens, _ in draft) == (case not in ("none", "prediction"))


@pytest.mark.parametrize("copied", [saved_and_restored, forked])
@pytest.mark.parametrize("case", CASES)
def test_a_copy_shares_no_memory(case: str, copied: Copy) -> None:
    original = learned(case)
    state, other = original.drafter.state(), copied(original).drafter.state()
    assert state.keys() == other.keys()
    assert [name for name in state if np.shares_memory(state[name], other[name])] == []


def test_a_state_of_another_layout_or_shape_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    saved = arrays_of(make("trigram", Resources()))
    with pytest.raises(StateError, match=r"keys is uint64 \[0\]"):
        load("trigram", Resources(), saved | {"rows.keys": saved["rows.keys"][:0]}, Sequence())
    with pytest.raises(StateError, match="known is missing"):
        load("trigram", Resources(), {name: saved[name] for name in saved if name != "known"}, Sequence())
    with pytest.raises(StateError, match="its layout is 0, and this version reads layout 1"):
        load("trigram", Resources(), {name: saved[name] for name in saved if name != "layout"}, Sequence())
    monkeypatch.setattr(registry, "LAYOUT", 2)
    with pytest.raises(StateError, match="its layout is 1, and this version reads layout 2"):
        load("trigram", Resources(), saved, Sequence())
