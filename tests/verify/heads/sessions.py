"""Sessions of targets and their draft heads, and what every kind of head must show."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider.drafters.interface import Ints
from outrider.drafters.none import NoDrafter
from outrider.drafters.options import DrafterName
from outrider.drafters.registry import Resources, clone, make
from outrider.verify.decode import decode
from outrider.verify.heads.loading import load_head
from outrider.verify.heads.model import HeadRunner
from outrider.verify.model.backend import load as load_weights
from outrider.verify.model.load_options import LoadOptions
from outrider.verify.model.runner import ModelRunner
from outrider.verify.sampling_params import SamplingParams
from outrider.verify.stream import DecodeOptions
from outrider.verify.verifier import Verifier
from tests.decoding import prefill, verify
from tests.verify.draft_model.test_draft_model import EAGER

GREEDY = SamplingParams(temperature=0)
TEXT: Ints = np.random.default_rng(3).integers(3, 97, 40).astype(np.int32)


def load_started(target: Path, head: str | Path, states: int | None = None, **options: Any) -> tuple[ModelRunner, Any]:
    """A target and its head, which have started. The hidden states of at most `states` positions are kept."""
    runner = load_weights(LoadOptions(str(target), dtype="float32", device="cpu", **options))
    found = load_head(str(head), runner)
    assert found is not None
    if states is not None:
        runner.cache_shape = replace(runner.cache_shape, hidden_positions=states)
    runner.start(256)
    found.start(256)
    return runner, found


def verifier_of(target: ModelRunner) -> Verifier:
    return Verifier(target, target.new_cache())


def begin(target: ModelRunner, session: Any, text: Any = TEXT, verifier: Verifier | None = None) -> Verifier:
    verifier = verifier or verifier_of(target)
    verifier.begin(np.array(text, np.int32), GREEDY, 64)
    prefill(verifier)
    session.begin(verifier.sequence)
    return verifier


def drafted(session: Any, depth: int) -> list[int]:
    """A chain of greedy drafts, at most as long as a block."""
    found = [int(session.root(1).tokens[0, 0])]
    while len(found) < depth and session.space:
        found.append(int(session.expand(found[-1:], [len(found) - 1], 1).tokens[0, 0]))
    return found


def run_on(verifier: Verifier, session: Any, tokens: list[int]) -> None:
    """Emits the target's own tokens, one per step, and tells the draft head."""
    for token in tokens:
        verdict = verify(verifier)
        assert verdict.tokens.tolist() == [token]
        verifier.commit(verdict)
    session.advance(np.array(tokens, np.int32))


def check_chain_at_once(session: Any, depth: int = 4) -> None:
    """The rows of a chain that are added at once have the candidates of those that are added one by one."""
    tokens = list(range(20, 20 + depth))
    session.root(1)
    found = session.expand(tokens, range(depth), 3)  # first, while no state of these rows is known
    session.root(1)
    one_by_one = [session.expand([token], [row], 3) for row, token in enumerate(tokens)]
    assert found.tokens.tolist() == [each.tokens[0].tolist() for each in one_by_one]
    assert found.probability == pytest.approx(np.concatenate([each.probability for each in one_by_one]), abs=1e-5)


def check_answers(target: ModelRunner, shared: HeadRunner, name: DrafterName, temperature: float) -> None:
    """Answers with drafts are those without, in each turn of a session and in its fork."""
    drafter = make(name, Resources(EAGER, model=shared.session, pair=shared.pair))
    plain, drafts, prompt = verifier_of(target), verifier_of(target), TEXT
    for turn in range(2):
        options = DecodeOptions(SamplingParams(temperature, seed=turn), 9, max_nodes=20)
        expected = decode(plain, NoDrafter(), prompt, options).tokens
        assert decode(drafts, drafter, prompt, options).tokens == expected
        prompt = np.concatenate([prompt, expected[:-3], [40, 41]]).astype(np.int32)  # leaves the text early
    forked = drafts.clone(target.new_cache(), 30)
    drafter = clone(drafter, drafts.sequence, forked.sequence)
    prompt = np.concatenate([TEXT[:30], [60, 61]]).astype(np.int32)
    assert decode(forked, drafter, prompt, options).tokens == decode(plain, NoDrafter(), prompt, options).tokens
