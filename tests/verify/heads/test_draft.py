"""Draft heads: candidates from the target's states, caches that follow sessions, and answers that equal plain decoding."""

from typing import Any, cast

import numpy as np
import pytest
import torch

from outrider import models
from outrider.drafters.interface import EMPTY, Ints
from outrider.drafters.none import NoDrafter
from outrider.drafters.options import DrafterName
from outrider.drafters.registry import Resources, clone, make
from outrider.verify.decode import decode
from outrider.verify.draft_model.runner import DraftRunner
from outrider.verify.heads.loading import load_head
from outrider.verify.heads.model import HeadModel, HeadRunner
from outrider.verify.model.backend import load as load_weights
from outrider.verify.model.cpu.native.runner import NativeRunner
from outrider.verify.model.load_options import Backend, LoadOptions, Quantize
from outrider.verify.model.runner import ModelRunner
from outrider.verify.model.torch_runner import TorchRunner
from outrider.verify.sampling_params import SamplingParams
from outrider.verify.stream import DecodeOptions
from outrider.verify.tokenizer import load_tokenizer
from outrider.verify.verifier import Verifier
from tests.decoding import answer_of
from tests.verify.draft_model.test_draft_model import EAGER, PROMPT, count_rows
from tests.verify.heads.checkpoints import KINDS, load_pair

GREEDY = SamplingParams(temperature=0)
Pair = tuple[ModelRunner, HeadModel]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    return {kind: load_pair(tmp_path_factory.mktemp("heads"), kind) for kind in KINDS}


@pytest.fixture(params=KINDS)
def pair(request: pytest.FixtureRequest, pairs: dict[str, Pair]) -> Pair:
    return pairs[request.param]


@pytest.fixture
def eagle(pairs: dict[str, Pair]) -> Pair:
    return pairs["eagle"]


def verifier_of(target: ModelRunner) -> Verifier:
    return Verifier(target, target.new_cache())


def begun(target: ModelRunner, head: HeadModel) -> tuple[Verifier, Any]:
    """Sessions of both that have read PROMPT."""
    verifier, session = verifier_of(target), HeadRunner(head).session()
    verifier.begin(PROMPT, GREEDY, 16)
    verifier.prefill()
    session.begin(verifier.sequence)
    return verifier, session


@torch.inference_mode()
def reference(target: ModelRunner, head: HeadModel, text: list[int], drafted: int) -> torch.Tensor:
    """The logits after a text by transformers' own attention, [V]. Its last `drafted` tokens read the head's own states."""
    assert isinstance(target, NativeRunner | TorchRunner)
    network = cast(Any, head.head)
    verifier, known = verifier_of(target), len(text) - drafted
    verifier.begin(np.array(text[:known], np.int32), GREEDY, 1)
    verifier.prefill()
    assert verifier.cache.hidden is not None
    states = head._fused(verifier.cache.hidden.read(0, known - 1))[None]
    embedded = target.embed_tokens(torch.tensor([text]))
    positions = torch.arange(len(text))[None]
    configs = [module.config for module in network.modules() if hasattr(module, "config")]
    for config in configs:
        config._attn_implementation = "sdpa"
    try:
        for _ in range(drafted + 1):
            size = states.shape[1]
            own = network.advance(embedded[:, 1 : size + 1], states, positions[:, 1 : size + 1], attention_mask=None)
            states = torch.cat([states, own[:, -1:]], 1)
    finally:
        for config in configs:
            config._attn_implementation = "outrider"
    return head.head.logits(own, head._lm_head)[0, -1]


def test_candidates_are_those_of_the_heads_layers(pair: Pair) -> None:
    target, head = pair
    _, session = begun(target, head)
    text = PROMPT.tolist()
    root = session.root(3)
    assert root.tokens[0].tolist() == reference(target, head, text, 0).topk(3).indices.tolist()
    first = int(root.tokens[0, 1])
    below = session.expand([int(root.tokens[0, 0]), first], [0, 0], 3)
    assert below.tokens[1].tolist() == reference(target, head, [*text, first], 1).topk(3).indices.tolist()
    second = int(below.tokens[1, 2])
    deeper = session.expand([second], [2], 3)
    assert deeper.tokens[0].tolist() == reference(target, head, [*text, first, second], 2).topk(3).indices.tolist()


@pytest.mark.parametrize(("kind", "name"), [("eagle", "fusion"), *((kind, "draft-tree") for kind in KINDS)])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_answers_equal_plain_decoding(pairs: dict[str, Pair], kind: str, name: DrafterName, temperature: float) -> None:
    target, head = pairs[kind]
    drafter = make(name, Resources(EAGER, model=HeadRunner(head).session))
    plain, drafted = verifier_of(target), verifier_of(target)
    prompt: Ints = PROMPT
    for turn in range(2):
        options = DecodeOptions(SamplingParams(temperature=temperature, seed=turn), 9, max_nodes=20)
        expected = decode(plain, NoDrafter(), prompt, options)
        assert decode(drafted, drafter, prompt, options).tokens == expected.tokens
        prompt = np.concatenate([prompt, expected.tokens[:-3], [40, 41]]).astype(np.int32)  # leaves the text early


def test_drafts_of_the_targets_own_choices_are_accepted(eagle: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accepted rows are read again, with the target's states; no forward is added for that."""
    target, head = eagle
    verifier, session = begun(target, head)
    rows = count_rows(monkeypatch, head)
    chosen = answer_of(target, PROMPT, DecodeOptions(GREEDY, 4)).tokens
    session.root(1)
    assert sum(rows) == len(PROMPT) - 1  # no state is before the first token
    session.expand(chosen[:1], [0], 1)
    session.expand(chosen[1:2], [1], 1)
    run_on(verifier, session, chosen[:3])
    rows.clear()
    after = session.root(3)
    assert rows == [3]
    text = [*PROMPT.tolist(), *chosen[:3]]
    assert after.tokens[0].tolist() == reference(target, head, text, 0).topk(3).indices.tolist()


def run_on(verifier: Verifier, session: Any, tokens: list[int]) -> None:
    """Emits the target's own tokens, one per step, and tells the draft head."""
    for token in tokens:
        verdict = verifier.verify(EMPTY)
        assert verdict.tokens.tolist() == [token]
        verifier.commit(verdict)
    session.advance(np.array(tokens, np.int32))


@pytest.mark.parametrize(("backend", "quantize"), [("torch", "none"), ("auto", "int4")])
def test_the_embedded_targets_head_drafts_its_tokens(backend: Backend, quantize: Quantize) -> None:
    loaded = LoadOptions(str(models.TARGET), dtype="float32", backend=backend, quantize=quantize)
    target = load_weights(loaded)
    head = load_head(str(models.HEAD), target)
    assert head is not None
    target.start(256)
    drafter = make("draft", Resources(EAGER, model=HeadRunner(head).session))
    prompt = load_tokenizer(str(models.TARGET)).encode("class Stack:\n    def __init__(self):\n")
    options = DecodeOptions(GREEDY, 24, max_nodes=8)
    found = decode(verifier_of(target), drafter, np.array(prompt, np.int32), options)
    assert found.tokens == answer_of(target, np.array(prompt, np.int32), DecodeOptions(GREEDY, 24)).tokens
    assert found.tokens_per_step > 1.5


@pytest.mark.parametrize("slots", [1, 2])
def test_a_fork_goes_on_with_the_rows_of_the_shared_text(eagle: Pair, monkeypatch: pytest.MonkeyPatch, slots: int) -> None:
    target, head = eagle
    drafter, verifier = make("draft", Resources(EAGER, model=HeadRunner(head, slots).session)), verifier_of(target)
    options = DecodeOptions(GREEDY, 6, max_nodes=20)
    decode(verifier, drafter, PROMPT, options)
    forked = verifier.clone(target.new_cache(), 15)
    copied = clone(drafter, verifier.sequence, forked.sequence)
    edited = np.concatenate([PROMPT[:15], [60, 61]]).astype(np.int32)
    rows = count_rows(monkeypatch, head)
    assert decode(forked, copied, edited, options).tokens == answer_of(target, edited, DecodeOptions(GREEDY, 6)).tokens
    assert rows[0] == (2 if slots == 2 else len(edited) - 1)
    assert forked.sequence.cache is forked.cache


def test_the_speed_of_a_head_is_measured_like_a_models(eagle: Pair) -> None:
    target, head = eagle
    shared: DraftRunner = HeadRunner(head)
    shared.measure(target)
    assert shared.pair.draft_seconds > 0
