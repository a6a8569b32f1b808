"""A drafter that was saved and restored, or copied for a fork, goes on exactly as the original; no state is forgotten."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from outrider.drafters import registry
from outrider.drafters.interface import Drafter, DraftTree, Ints, Verdict
from outrider.drafters.options import NAMES, DrafterName, FusionOptions, Options, PearlOptions
from outrider.drafters.registry import Resources, arrays_of, load, make
from outrider.drafters.sequence import Reader, Sequence
from outrider.drafters.state import StateError, array, numbers, restore
from outrider.drafters.tables.suffix import index
from tests.language import ToyModel

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
# What begins anew with each request or draft, what is counted for reports, and buffers: a new drafter may differ in them.
TRANSIENT = {
    "TrigramDrafter": {"_pool", "_sequence"},
    "RetrievalDrafter": {"_trie", "_match", "_first", "_expected"},
    "LookupDrafter": {"_candidates"},
    "LookaheadDrafter": {"_trie", "_proposed"},
    "FusionDrafter": {"_contexts", "_scratch", "_nodes", "_dice", "_expected_before"},
    "DraftDrafter": {"_nodes", "_q", "_started", "drafted_tokens"},
    "DraftTreeDrafter": {"_nodes", "_q", "_started", "drafted_tokens"},
    "DraftGraphDrafter": {"_nodes", "_q", "_started", "drafted_tokens", "_places", "_merges"},
    "ModelChain": {"_waited_seconds", "drafted_tokens", "accepted_tokens", "rejections"},
    "PearlDrafter": {"_waited_seconds", "drafted_tokens", "accepted_tokens", "rejections"},
    "UnionDrafter": {"_work", "_had_chain", "_table_tree", "_expected", "_started", "_draft_seconds"},
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
    resources = Resources(options, corpus=corpus, vocabulary=VOCABULARY, model=lambda: ToyModel(TABLE))
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


def attributes(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    """All that a drafter is made of, without the text, draft models, and what is TRANSIENT."""
    if isinstance(value, np.ndarray):
        yield path, (value.dtype, value.tolist())
    elif isinstance(value, Reader):
        yield path, value.known
    elif isinstance(value, dict):
        for number, (key, part) in enumerate(value.items()):
            yield from attributes(part, f"{path}[{key}, the {number}th]")
    elif isinstance(value, list | tuple):
        yield path, len(value)
        for number, part in enumerate(value):
            yield from attributes(part, f"{path}[{number}]")
    elif (
        hasattr(value, "__dict__")
        and type(value).__module__.startswith("outrider.drafters.")
        and not isinstance(value, Sequence)
    ):
        for name in vars(value).keys() - TRANSIENT.get(type(value).__name__, set()):
            yield from attributes(vars(value)[name], f"{path}.{name}")
    elif isinstance(value, int | float | str | None):
        yield path, value


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
def test_a_copy_has_all_state_of_the_original(case: str, copied: Copy) -> None:
    """In the next request, it differs from the original in nothing but buffers: so no class that learns is forgotten."""
    original, other = learned(case), copied(learned(case))
    for each in (original, other):
        each.begin(np.concatenate([original.text.tokens[:100], OTHER[:5]]))
    expected, found = dict(attributes(original.drafter)), dict(attributes(other.drafter))
    assert {name: (value, found.get(name)) for name, value in expected.items() if found.get(name) != value} == {}
    assert found.keys() == expected.keys()


@pytest.mark.parametrize("copied", [saved_and_restored, forked])
@pytest.mark.parametrize("case", CASES)
def test_a_copy_shares_no_memory(case: str, copied: Copy) -> None:
    original = learned(case)
    state, other = original.drafter.state(), copied(original).drafter.state()
    assert state.keys() == other.keys()
    assert [name for name in state if np.shares_memory(state[name], other[name])] == []


def test_a_reader_that_was_restored_knows_what_the_saved_one_knew() -> None:
    """Here it has not read the answer to the last request, because another drafter was used."""
    session = learned("trigram")
    session.text.begin(TEXT[:20])
    session.text.begin(np.concatenate([TEXT[:20], OTHER]))
    assert saved_and_restored(session).drafter.state()["known"] == session.drafter.state()["known"] == [20]


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


def test_arrays_are_checked() -> None:
    saved = {"means": numbers(1, 2)}
    assert array(saved, "means", np.float64, 2).tolist() == array(saved, "means", np.float64, None).tolist() == [1, 2]
    for dtype, shape in ((np.float32, (2,)), (np.float64, (3,)), (np.float64, (2, 1))):
        with pytest.raises(StateError, match=r"means is float64 \[2\]"):
            array(saved, "means", dtype, *shape)
    target = {"means": np.zeros(2)}
    restore(target, saved)
    assert target["means"].tolist() == [1, 2]
