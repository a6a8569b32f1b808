"""Drafts from the target's own cache: nothing is read, nothing collides, and answers equal plain decoding."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from llguidance import LLMatcher
from transformers import LlamaConfig

from outrider import models
from outrider.drafters.interface import EMPTY, MAX_NODES, Ints, Source
from outrider.drafters.interface import chain as chain_of
from outrider.drafters.model.chain import ModelChain
from outrider.drafters.none import NoDrafter
from outrider.drafters.options import NEED_A_MODEL, DrafterName, PearlOptions
from outrider.drafters.pearl import PearlDrafter
from outrider.drafters.registry import Resources, make, warm
from outrider.verify.constraints.grammar import GrammarCompiler
from outrider.verify.decode import decode, finish
from outrider.verify.generation import DecodeOptions, Generation
from outrider.verify.model import invariance
from outrider.verify.model.batch import ForwardBatch
from outrider.verify.model.loading import LoadOptions, load_weights
from outrider.verify.model.runner import ModelRunner
from outrider.verify.sampling_params import SamplingParams
from outrider.verify.self_draft.loading import share_target
from outrider.verify.self_draft.session import SelfRunner
from outrider.verify.tokenizer import load_tokenizer
from outrider.verify.verifier import TreeVerifier
from tests.rounds import answers_in_rounds
from tests.verify.draft_model.test_draft_model import EAGER, PROMPT, count_rows
from tests.verify.self_draft.targets import layered

DRAFTERS: tuple[DrafterName, ...] = (*NEED_A_MODEL, "fusion")
IN_SHORT = (("draft-tree", 0.8), ("pearl", 0.0))  # the others are soak tests
GREEDY = SamplingParams(temperature=0)


@pytest.fixture(scope="module")
def target(tiny_config: LlamaConfig) -> ModelRunner:
    return layered(tiny_config, traced=True, pack=True)


@pytest.fixture(scope="module")
def shared(target: ModelRunner) -> SelfRunner:
    """Skips layers, so that some drafts are accepted and others are not."""
    return share_target(target, (2, 3))


@pytest.fixture(scope="module")
def whole(target: ModelRunner) -> SelfRunner:
    """Skips nothing, so that every greedy draft is the target's choice if it reads the target's rows."""
    return share_target(target, ())


def verifier_of(target: ModelRunner) -> TreeVerifier:
    return TreeVerifier(target, target.new_cache())


def answer(target: ModelRunner, prompt: Ints, options: DecodeOptions) -> list[int]:
    return decode(verifier_of(target), NoDrafter(), prompt, options).tokens


@pytest.mark.parametrize(
    ("name", "temperature"),
    [
        pytest.param(name, temperature, marks=[] if (name, temperature) in IN_SHORT else [pytest.mark.slow])
        for name in DRAFTERS
        for temperature in (0.0, 0.8)
    ],
)
def test_answers_equal_plain_decoding(target: ModelRunner, shared: SelfRunner, name: DrafterName, temperature: float) -> None:
    """In a session whose second turn leaves the text early, and in a fork of it."""
    drafter, drafted, plain = make(name, Resources(EAGER, model=shared.session)), verifier_of(target), verifier_of(target)
    prompt: Ints = PROMPT
    for turn in range(2):
        options = DecodeOptions(SamplingParams(temperature=temperature, seed=turn), 12, max_nodes=20)
        expected = decode(plain, NoDrafter(), prompt, options).tokens
        assert decode(drafted, drafter, prompt, options).tokens == expected
        prompt = np.concatenate([prompt, expected[:-3], [40, 41]]).astype(np.int32)
    memo: dict[int, Any] = {}
    forked = drafted.fork(target.new_cache(), 15, memo)
    copied = copy.deepcopy(drafter, memo)
    edited = np.concatenate([PROMPT[:15], [60, 61]]).astype(np.int32)
    assert decode(forked, copied, edited, options).tokens == answer(target, edited, options)
    assert decode(drafted, drafter, prompt, options).tokens == answer(target, prompt, options)


@pytest.mark.parametrize("name", ["draft", "draft-tree", "pearl"])
def test_drafts_of_all_layers_are_the_targets_choices(target: ModelRunner, whole: SelfRunner, name: DrafterName) -> None:
    """Also in the second turn, and after the session was swapped out: the rows of the text are the target's."""
    drafter, verifier = make(name, Resources(EAGER, model=whole.session)), verifier_of(target)
    prompt: Ints = PROMPT
    for _ in range(2):
        found = decode(verifier, drafter, prompt, DecodeOptions(GREEDY, 16, max_nodes=20))
        prompt = np.concatenate([prompt, found.tokens, [7, 8]]).astype(np.int32)
        verifier.swap_in(verifier.swap_out())
        if isinstance(drafter, PearlDrafter):  # how many tokens it drafts depends on the time
            assert drafter.rejections == 0
        else:
            assert found.tokens_per_step > 3


def test_a_chain_of_all_layers_may_be_continued_in_the_other_thread(target: ModelRunner, whole: SelfRunner) -> None:
    """What was drafted before the target's forward is continued during it, where its rows are overwritten."""
    verifier, chain = verifier_of(target), ModelChain(whole.session(), PearlOptions(window=4, ahead=0))
    generation = Generation(verifier, NoDrafter(), PROMPT, DecodeOptions(GREEDY, 16))
    expected = answer(target, PROMPT, DecodeOptions(GREEDY, 16))
    verifier.prefill()
    chain.start(verifier.sequence)
    chain.draft(3)
    wrong = np.array([token + 1 for token in expected[:4]], np.int32)
    verifier.verify(chain_of(wrong, np.ones(4, np.float32), Source.LOOKUP))  # overwrites the rows of the chain
    chain.draft_beside()
    chain._finish_forward()
    while len(chain) < 7:
        chain.draft(1)
        chain.draft_beside()
        chain._finish_forward()
    assert chain.tokens[:7] == expected[:7]
    chain.end()
    generation.close()


def test_no_token_of_a_prompt_is_read(target: ModelRunner, shared: SelfRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = count_rows(monkeypatch, shared.runner)
    drafter = make("draft", Resources(EAGER, model=shared.session))
    decode(verifier_of(target), drafter, PROMPT, DecodeOptions(GREEDY, 8, max_nodes=20))
    assert set(rows) == {1}


@pytest.mark.parametrize("length", [126, *(pytest.param(length, marks=pytest.mark.slow) for length in (120, 90))])
@pytest.mark.parametrize("name", ["draft-tree", "pearl"])
def test_a_text_is_drafted_up_to_the_end_of_the_context(
    target: ModelRunner, shared: SelfRunner, name: DrafterName, length: int
) -> None:
    prompt = (np.arange(length) % 90).astype(np.int32)
    options = DecodeOptions(GREEDY, 64, max_nodes=64)
    drafter = make(name, Resources(EAGER, model=shared.session))
    assert decode(verifier_of(target), drafter, prompt, options).tokens == answer(target, prompt, options)


def test_the_rows_of_pearls_drafts_lie_behind_those_that_the_target_writes(target: ModelRunner, whole: SelfRunner) -> None:
    """The target computes a whole tree between two forwards of the drafts, which go on as if it had not."""
    verifier, session = verifier_of(target), whole.session()
    verifier.begin(PROMPT, GREEDY, 16)
    verifier.prefill()
    whole.submit(lambda: session.begin(verifier.sequence)).result()
    chosen = answer(target, PROMPT, DecodeOptions(GREEDY, 4))
    assert whole.submit(lambda: session.root(1)).result().tokens[0, 0] == chosen[0]
    target.forward(verifier.cache, ForwardBatch.chain(torch.full((MAX_NODES + 1,), 9)))
    below = whole.submit(lambda: session.expand(chosen[:1], [0], 1)).result()
    assert below.tokens[0, 0] == chosen[1]
    verdict = verifier.verify(EMPTY)
    verifier.commit(verdict)
    whole.submit(lambda: session.advance(verdict.tokens)).result()
    deeper = whole.submit(lambda: session.expand(chosen[1:2], [0], 1)).result()
    assert deeper.tokens[0, 0] == chosen[2]


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_streams_get_the_answers_of_each_alone(target: ModelRunner, shared: SelfRunner, temperature: float) -> None:
    resources = Resources(EAGER, model=shared.session)

    def generation(number: int) -> Generation:
        options = DecodeOptions(SamplingParams(temperature=temperature, seed=number), 12, max_nodes=8)
        return Generation(verifier_of(target), make(DRAFTERS[number], resources), PROMPT[: 4 + number], options)

    alone = [finish(generation(number)).tokens for number in range(len(DRAFTERS))]
    assert answers_in_rounds([generation(number) for number in range(len(DRAFTERS))], shared.together) == alone


def test_rejection_is_reproducible_and_respects_top_k(target: ModelRunner, shared: SelfRunner) -> None:
    def drafted(**changes: Any) -> list[int]:
        params = SamplingParams(temperature=1.0, seed=2, rule="rejection", **changes)
        drafter = make("draft-tree", Resources(EAGER, model=shared.session))
        return decode(verifier_of(target), drafter, PROMPT, DecodeOptions(params, 12)).tokens

    assert drafted() == drafted()
    assert drafted(top_k=1) == answer(target, PROMPT, DecodeOptions(GREEDY, 12))


def test_nothing_is_drafted_where_it_is_not_expected_to_pay(
    target: ModelRunner, shared: SelfRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "drafts", False)
    rows = count_rows(monkeypatch, shared.runner)
    resources = Resources(EAGER, model=shared.session)
    for name in DRAFTERS:
        options = DecodeOptions(GREEDY, 6, max_nodes=20)
        assert decode(verifier_of(target), make(name, resources), PROMPT, options).tokens == answer(target, PROMPT, options)
    assert rows == []


def test_kernels_are_compiled_without_a_target(shared: SelfRunner) -> None:
    warm(Resources(EAGER, model=shared.session))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.slow
def test_the_embedded_models_answers(dtype: str) -> None:
    """By rows that have the same bits in every forward; one answer follows a grammar."""
    target = load_weights(LoadOptions(str(models.TARGET), dtype=dtype))
    tokenizer = load_tokenizer(str(models.TARGET))
    if dtype == "float32":
        target.start(400)
    else:
        invariance.start(target, 400, "on", None)
    shared = share_target(target, (4, 5))
    grammars = GrammarCompiler(tokenizer, target.vocabulary, [int(tokenizer.eos_token_id)])
    text = "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push("
    prompt = np.array(tokenizer.encode(text), np.int32)
    for name in DRAFTERS:
        for temperature, pattern in ((0.0, None), (0.8, None), (0.8, "[a-z ]{5,30}")):
            options = DecodeOptions(SamplingParams(temperature=temperature, seed=3), 48, max_nodes=24)
            followed = [None if pattern is None else grammars.compile(LLMatcher.grammar_from_regex(pattern)) for _ in range(2)]
            drafter = make(name, Resources(EAGER, model=shared.session))
            expected = decode(verifier_of(target), NoDrafter(), prompt, options, followed.pop())
            found = decode(verifier_of(target), drafter, prompt, options, followed.pop())
            assert found.tokens == expected.tokens
            assert pattern or name == "pearl" or found.tokens_per_step > 1.2
