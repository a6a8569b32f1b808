"""Draft models: incremental rows, cache reuse, noise shared with the target, and lossless answers."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider import models
from outrider.drafters.interface import Ints, Source
from outrider.drafters.none import NoDrafter
from outrider.drafters.options import (
    NEED_A_MODEL,
    DrafterName,
    DraftGraphOptions,
    DraftOptions,
    DraftTreeOptions,
    Options,
    PearlOptions,
)
from outrider.drafters.registry import Resources, clone, make
from outrider.drafters.sequence import Sequence as Text
from outrider.verify.decode import decode
from outrider.verify.draft_model.runner import DraftRunner
from outrider.verify.draft_model.session import SessionDraft
from outrider.verify.heads.model import HeadModel
from outrider.verify.model import backend
from outrider.verify.model.batch import ForwardBatch
from outrider.verify.model.load_options import LoadOptions
from outrider.verify.model.runner import ModelRunner
from outrider.verify.model.torch_runner import TorchRunner
from outrider.verify.sampling_params import SamplingParams
from outrider.verify.stream import DecodeOptions
from outrider.verify.verifier import Verifier
from tests.decoding import answer_of
from tests.slow import mostly_slow

PROMPT = np.arange(3, 20, dtype=np.int32)
TREE = DraftTreeOptions(3, 4, 0, 0, only_if_worth=False)
EAGER = Options(
    draft=DraftOptions(4, only_if_worth=False),
    draft_tree=TREE,
    draft_graph=DraftGraphOptions(3, 4, 0, 0, only_if_worth=False, tau=1),
    pearl=PearlOptions(only_if_worth=False, window=3),
)


def close_relative(runner: TorchRunner, config: LlamaConfig, vocabulary: int = 97) -> TorchRunner:
    """A copy of the runner's model with noise added to the weights and another vocabulary size."""
    torch.manual_seed(1)
    changed = LlamaConfig(**{**config.to_dict(), "vocab_size": vocabulary})
    changed._attn_implementation = config._attn_implementation
    model = LlamaForCausalLM(changed)
    originals = dict(runner.model.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            size = min(len(parameter), len(originals[name]))
            parameter[:size] = originals[name][:size] + 0.02 * torch.randn_like(parameter[:size])
    return TorchRunner(model)


def started(draft: DraftRunner, text: Sequence[int] | Ints) -> tuple[SessionDraft, Text]:
    session, sequence = draft.session(), Text()
    sequence.begin(np.array(text, np.int32))
    session.begin(sequence)
    return session, sequence


@pytest.fixture(scope="module", params=mostly_slow([97, 80, 128], 80), ids=lambda size: f"vocabulary {size}")
def draft(request: pytest.FixtureRequest, tiny_runner: TorchRunner, tiny_config: LlamaConfig) -> DraftRunner:
    return DraftRunner(close_relative(tiny_runner, tiny_config, request.param), tiny_runner.vocabulary)


def count_rows(monkeypatch: pytest.MonkeyPatch, runner: ModelRunner | HeadModel) -> list[int]:
    """A list that receives the number of rows that each forward of the runner computes."""
    counts: list[int] = []
    forward: Any = runner.forward

    def counted(cache: Any, batch: ForwardBatch, logits: bool = True) -> Any:
        counts.append(len(batch) - batch.known)
        return forward(cache, batch, logits)

    monkeypatch.setattr(runner, "forward", counted)
    return counts


def test_candidates_are_the_top_tokens(draft: DraftRunner) -> None:
    session, _ = started(draft, PROMPT)
    root = session.root(3)
    below = session.expand([int(root.tokens[0, 0]), int(root.tokens[0, 1])], [0, 0], 3)
    deeper = session.expand([int(below.tokens[1, 0])], [2], 3)
    runner = draft.runner
    for path, found in (
        ([], root.tokens[0]),
        ([root.tokens[0, 1]], below.tokens[1]),
        ([root.tokens[0, 1], below.tokens[1, 0]], deeper.tokens[0]),
    ):
        text = torch.from_numpy(np.concatenate([PROMPT, path]).astype(np.int64))
        logits = runner.forward(runner.new_cache(), ForwardBatch.chain(text))[-1, : len(draft.ids.own)]
        assert found.tolist() == logits.topk(3).indices.tolist()
        assert found.max() < 97


def test_the_cache_follows_the_accepted_path(draft: DraftRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    session, text = started(draft, PROMPT)
    root = session.root(2)
    rows = count_rows(monkeypatch, draft.runner)
    first = int(root.tokens[0, 1])
    below = session.expand([int(root.tokens[0, 0]), first], [0, 0], 2)
    second = int(below.tokens[1, 0])
    session.expand([second], [2], 2)
    added = np.array([first, second, 7, 8], np.int32)  # two of them are rows
    text.append(added)
    session.advance(added)
    rows.clear()
    after = session.root(4)
    assert rows == [2]
    again = started(draft, [*PROMPT, *added])[0].root(4)
    assert after.tokens.tolist() == again.tokens.tolist()
    assert np.allclose(after.probability, again.probability, atol=1e-5)


def test_shared_noise_samples_the_targets_tokens(tiny_runner: TorchRunner) -> None:
    """Sampling, a draft model equal to the target is never rejected: equal distributions give equal samples."""
    shared = DraftRunner(tiny_runner, tiny_runner.vocabulary)
    drafter = make("draft", Resources(EAGER, model=shared.session))
    options = DecodeOptions(SamplingParams(temperature=1.3, seed=5), 50)
    decoded = answer_of(tiny_runner, PROMPT, options, drafter)
    assert len(decoded.tokens) == 5 * len(decoded.steps)


@pytest.mark.parametrize(
    ("name", "temperature"), mostly_slow(product(NEED_A_MODEL, (0.0, 1.0)), *product(NEED_A_MODEL, (1.0,)))
)
def test_answers_equal_plain_decoding(
    draft: DraftRunner, tiny_runner: TorchRunner, name: DrafterName, temperature: float
) -> None:
    resources = Resources(EAGER, model=draft.session)
    drafter, plain, drafted = make(name, resources), *(Verifier(tiny_runner, tiny_runner.new_cache()) for _ in range(2))
    prompt: Ints = PROMPT
    accepted = 0
    for turn in range(3):  # each answer becomes part of the next prompt
        options = DecodeOptions(SamplingParams(temperature=temperature, seed=turn), 25, max_nodes=20)
        expected = decode(plain, NoDrafter(), prompt, options)
        found = decode(drafted, drafter, prompt, options)
        assert found.tokens == expected.tokens
        accepted += len(found.tokens) - len(found.steps)
        prompt = np.concatenate([prompt, expected.tokens, [40 + turn]]).astype(np.int32)
    # `pearl` may have drafted no more than the target's own next tokens.
    assert accepted > 0 or name == "pearl" or draft.runner.vocabulary < tiny_runner.vocabulary


@pytest.mark.parametrize("name", NEED_A_MODEL)
def test_decoding_continues_beyond_the_draft_models_context(
    tiny_runner: TorchRunner, tiny_config: LlamaConfig, name: DrafterName
) -> None:
    short = TorchRunner(close_relative(tiny_runner, tiny_config).model, 40)
    resources = Resources(EAGER, model=DraftRunner(short, tiny_runner.vocabulary).session)
    options = DecodeOptions(SamplingParams(temperature=0), 1000)
    expected = answer_of(tiny_runner, PROMPT, options)
    found = answer_of(tiny_runner, PROMPT, options, make(name, resources))
    assert found.tokens == expected.tokens
    assert found.finish == "length"


@pytest.mark.parametrize("name", NEED_A_MODEL)
def test_rejection_is_reproducible_and_respects_top_k(tiny_runner: TorchRunner, draft: DraftRunner, name: DrafterName) -> None:
    params = SamplingParams(temperature=1.0, seed=2, rule="rejection")

    def answer(params: SamplingParams) -> list[int]:
        drafter = make(name, Resources(EAGER, model=draft.session))  # nothing is known of the pair
        return answer_of(tiny_runner, PROMPT, DecodeOptions(params, 30), drafter).tokens

    if name != "pearl":  # its draft length depends on timing
        assert answer(params) == answer(params)
    greedy = DecodeOptions(SamplingParams(temperature=0), 30)
    plain = answer_of(tiny_runner, PROMPT, greedy).tokens
    assert answer(replace(params, top_k=1)) == plain


@pytest.mark.parametrize("name", NEED_A_MODEL)
@pytest.mark.parametrize("temperature", mostly_slow([0.0, 1.0], 1.0))
def test_tokens_that_differ_are_read_as_others_and_never_drafted(
    tiny_runner: TorchRunner, tiny_config: LlamaConfig, name: DrafterName, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model that is the target but for half of its tokens, which the text has, too."""
    same = close_relative(tiny_runner, tiny_config)
    shared = DraftRunner(same, tiny_runner.vocabulary, differences=dict.fromkeys(range(40, 97), 3))
    read = list[int]()
    forward = same.forward

    def recorded(cache: Any, batch: ForwardBatch, logits: bool = True) -> Any:
        read.extend(batch.tokens.tolist())
        return forward(cache, batch, logits)

    monkeypatch.setattr(same, "forward", recorded)
    options, prompt = DecodeOptions(SamplingParams(temperature=temperature, seed=1), 20), np.array([5, 90, 6, 41], np.int32)
    found = answer_of(tiny_runner, prompt, options, make(name, Resources(EAGER, model=shared.session)))
    assert found.tokens == answer_of(tiny_runner, prompt, options).tokens
    assert read and max(read) < 40
    trees = [step.tree for step in found.steps if step.tree is not None and len(step.tree)]
    assert (trees or name == "pearl") and all(tree.tokens[tree.source == Source.DRAFT].max(initial=0) < 40 for tree in trees)


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("name", NEED_A_MODEL)
def test_a_fork_reads_only_new_tokens(
    tiny_runner: TorchRunner, monkeypatch: pytest.MonkeyPatch, name: DrafterName, slots: int
) -> None:
    """Both go on as if the other were not there. With one cache for both, the fork reads its text."""
    shared = DraftRunner(close_relative(tiny_runner, tiny_runner.model.config), tiny_runner.vocabulary, slots)
    resources, options = Resources(EAGER, model=shared.session), DecodeOptions(SamplingParams(temperature=0), 12)
    verifier, drafter = Verifier(tiny_runner, tiny_runner.new_cache()), make(name, resources)
    text = np.concatenate([PROMPT, decode(verifier, drafter, PROMPT, options).tokens]).astype(np.int32)
    forked = verifier.clone(tiny_runner.new_cache(), 15)
    copied = clone(drafter, verifier.sequence, forked.sequence)
    rows = count_rows(monkeypatch, shared.runner)
    edited = np.concatenate([PROMPT[:15], [60, 61]]).astype(np.int32)
    expected = answer_of(tiny_runner, edited, options).tokens
    assert decode(forked, copied, edited, options).tokens == expected
    assert rows[0] == (2 if slots == 2 else len(edited) - 1)
    rows.clear()
    decode(verifier, drafter, np.append(text, [7]).astype(np.int32), options)
    if slots == 2:
        assert rows[0] < 8


def test_a_long_prompt_is_read_in_chunks(tiny_runner: TorchRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    draft = DraftRunner(close_relative(tiny_runner, tiny_runner.model.config), tiny_runner.vocabulary)
    (session, _), (other, _) = (started(draft, range(60)) for _ in range(2))
    assert session.unread == 60
    rows = count_rows(monkeypatch, draft.runner)
    chunks = [session.read(20) for _ in range(4)]
    assert chunks == [20, 20, 19, 0]  # the last token is read with the first draft
    assert rows == [20, 20, 19]
    assert session.unread == 1
    assert np.array_equal(session.root(5).tokens, other.root(5).tokens)


def test_a_draft_models_head_has_4_bits() -> None:
    text = ForwardBatch.chain(np.arange(5, 69))
    plain, draft = (backend.load_model(LoadOptions(str(models.DRAFT), device="cpu", is_draft=each)) for each in (False, True))
    chosen = [np.array(each.forward(each.new_cache(), text)).argmax(-1) for each in (plain, draft)]
    assert draft.weight_bytes < plain.weight_bytes
    assert 0.8 < np.mean(chosen[0] == chosen[1]) <= 1


def test_both_models_are_timed(tiny_runner: TorchRunner) -> None:
    draft = DraftRunner(close_relative(tiny_runner, tiny_runner.model.config), tiny_runner.vocabulary)
    draft.measure(tiny_runner)
    pair = draft.pair
    assert min(pair.target_seconds, pair.draft_seconds, pair.read_seconds) > 0
    assert min(pair.target_slowdown, pair.draft_slowdown) >= 1


@pytest.mark.parametrize("figure", ["draft_seconds", "read_seconds"])
def test_figures_of_a_busy_machine_are_replaced_and_those_of_steps_are_kept(tiny_runner: TorchRunner, figure: str) -> None:
    draft = DraftRunner(close_relative(tiny_runner, tiny_runner.model.config), tiny_runner.vocabulary)
    draft.measure(tiny_runner)
    setattr(draft.pair, figure, 60.0)
    draft.pair.target_slowdown = 50.0
    draft.measure(tiny_runner)
    assert getattr(draft.pair, figure) < 60 and draft.pair.target_slowdown < 50
    draft.pair.draft_seconds = draft.pair.read_seconds = 1e-9  # less than any that is measured
    draft.pair.target_slowdown = 50.0
    draft.measure(tiny_runner)
    assert draft.pair.draft_seconds == 1e-9 and draft.pair.target_slowdown == 50
