"""The decode loop emits plain decoding's tokens for any drafter; the verifier keeps text and cache in sync."""

import numpy as np
import pytest

from outrider.drafters.interface import MAX_NODES, Drafter, Ints
from outrider.drafters.none import NoDrafter
from outrider.verify.decode import Decoded, decode, step
from outrider.verify.model.torch_runner import TorchRunner
from outrider.verify.sampling_params import SamplingParams
from outrider.verify.stream import DecodeOptions, PromptError, Stream
from outrider.verify.verifier import Verifier
from tests.decoding import answer_of
from tests.drafts import Bush, Chaos, Oracle

PROMPT = np.array([5, 17, 42, 5, 17], np.int32)
GREEDY = SamplingParams(temperature=0)
SAMPLED = SamplingParams(temperature=1.0, seed=11)


def run(runner: TorchRunner, drafter: Drafter, options: DecodeOptions, prompt: Ints = PROMPT) -> Decoded:
    return answer_of(runner, prompt, options, drafter)


def plain(runner: TorchRunner, options: DecodeOptions, prompt: Ints = PROMPT) -> list[int]:
    return run(runner, NoDrafter(), options, prompt).tokens


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
@pytest.mark.parametrize(("wrong", "steps"), [(1, 2), (3, 4)])
def test_the_largest_drafts_emit_the_tokens_of_plain_decoding(
    tiny_runner: TorchRunner, params: SamplingParams, wrong: int, steps: int
) -> None:
    options = DecodeOptions(params, max_tokens=120, max_nodes=MAX_NODES)
    expected = plain(tiny_runner, options)
    decoded = run(tiny_runner, Bush(expected, wrong=wrong), options)
    assert decoded.tokens == expected
    assert len(decoded.steps) == steps
    assert {len(each.tree) for each in decoded.steps if each.tree is not None} >= {MAX_NODES}


@pytest.mark.parametrize("limit", [1, 7, 8, 20])
def test_max_tokens_inside_an_accepted_block(tiny_runner: TorchRunner, limit: int) -> None:
    expected = plain(tiny_runner, DecodeOptions(GREEDY, max_tokens=40))
    decoded = run(tiny_runner, Oracle(expected), DecodeOptions(GREEDY, max_tokens=limit))
    assert decoded.tokens == expected[:limit]
    assert decoded.finish == "length"


def test_a_stop_token_inside_an_accepted_block(tiny_runner: TorchRunner) -> None:
    expected = plain(tiny_runner, DecodeOptions(SAMPLED, max_tokens=40))
    stop = expected[10]
    first = expected.index(stop)
    decoded = run(tiny_runner, Oracle(expected), DecodeOptions(SAMPLED, 40, frozenset([stop])))
    assert decoded.tokens == expected[: first + 1]
    assert decoded.finish == "stop"


def test_the_context_limit_inside_an_accepted_block(tiny_runner: TorchRunner) -> None:
    options = DecodeOptions(SAMPLED, max_tokens=10_000)
    expected = plain(tiny_runner, options)
    assert len(expected) == tiny_runner.context_tokens - len(PROMPT)
    for drafter in (Oracle(expected, length=40), Chaos(97)):
        assert run(tiny_runner, drafter, options).tokens == expected


def test_a_prompt_must_leave_room_in_the_context(tiny_runner: TorchRunner) -> None:
    verifier = Verifier(tiny_runner, tiny_runner.new_cache())
    options = DecodeOptions(GREEDY, max_tokens=5)
    for size in (0, tiny_runner.context_tokens):
        with pytest.raises(PromptError):
            Stream(verifier, NoDrafter(), np.ones(size, np.int32), options)
    last = np.ones(tiny_runner.context_tokens - 1, np.int32)
    assert len(decode(verifier, NoDrafter(), last, options).tokens) == 1


def test_a_long_prompt_is_read_in_chunks_that_can_be_abandoned(
    tiny_runner: TorchRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.verify.controller.PREFILL_CHUNK_TOKENS", 16)
    prompt = np.arange(60, dtype=np.int32) % 97
    options = DecodeOptions(SAMPLED, max_tokens=20)
    expected = plain(tiny_runner, options, prompt)
    verifier = Verifier(tiny_runner, tiny_runner.new_cache())
    abandoned = Stream(verifier, NoDrafter(), prompt, options)
    for _ in range(2):
        assert step(abandoned).tokens == []
    abandoned.close()
    resumed = Stream(verifier, NoDrafter(), prompt, options)
    assert resumed.reused_tokens == 32
    assert decode(verifier, NoDrafter(), prompt, options).tokens == expected


def test_the_next_turn_reuses_the_prefix_and_emits_the_same_tokens(tiny_runner: TorchRunner) -> None:
    options = DecodeOptions(SAMPLED, max_tokens=12)
    verifier = Verifier(tiny_runner, tiny_runner.new_cache())
    first = decode(verifier, Chaos(97), PROMPT, options).tokens
    turn = np.array([*PROMPT, *first, 33, 34], np.int32)
    again = Stream(verifier, NoDrafter(), turn, options)
    assert again.reused_tokens == len(PROMPT) + len(first) - 1
    assert decode(verifier, Oracle(first), turn, options).tokens == plain(tiny_runner, options, turn)
    # A conversation that takes another turn shares only a prefix.
    other = np.array([*PROMPT, first[0], 90, 91], np.int32)
    assert decode(verifier, NoDrafter(), other, options).tokens == plain(tiny_runner, options, other)


def test_tokens_that_are_taken_back_leave_the_text(tiny_runner: TorchRunner) -> None:
    options = DecodeOptions(GREEDY, max_tokens=30)
    expected = plain(tiny_runner, options)
    verifier = Verifier(tiny_runner, tiny_runner.new_cache())
    stream = Stream(verifier, Oracle(expected), PROMPT, options)
    while not (taken := step(stream)).tokens:
        pass
    stream.take_back(3)
    stream.close()
    assert verifier.sequence.tokens.tolist() == [*PROMPT.tolist(), *expected[: len(taken.tokens) - 3]]
    turn = np.array([*verifier.sequence.tokens, 8, 9], np.int32)
    assert decode(verifier, NoDrafter(), turn, options).tokens == plain(tiny_runner, options, turn)


@pytest.mark.parametrize("read", [0, 1, 3])
@pytest.mark.parametrize("scores", [False, True])
def test_dropped_rows_are_read_again(tiny_runner: TorchRunner, read: int, scores: bool) -> None:
    """During the prompt and after it; neither the answer nor the prompt's log-probabilities change."""
    prompt = np.arange(tiny_runner.context_tokens - 20, dtype=np.int32) % 90
    options = DecodeOptions(SamplingParams(temperature=0, logprobs=2), 6, wants_prompt_logprobs=scores)
    found = []
    for drops in (False, True):
        stream = Stream(verifier := Verifier(tiny_runner, tiny_runner.new_cache()), NoDrafter(), prompt, options)
        tokens: list[int] = []
        rounds = 0
        while len(tokens) < 6:
            tokens += step(stream).tokens
            rounds += 1
            if drops and rounds == 1 + read and (slot := verifier.drop_rows()) is not None:
                verifier.swap_in(slot)
                assert verifier.unread_prompt == len(verifier.sequence) - 1
        scored = stream.verifier.prompt_logprobs
        found.append((tokens, None if scored is None else (scored.chosen.tolist(), scored.top_ids.tolist())))
    assert found[0] == found[1]
    assert found[0][1] is None or len(found[0][1][0]) == len(prompt) - 1
