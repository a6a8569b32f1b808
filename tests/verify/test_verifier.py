"""The verifier keeps text and cache in sync when tokens are committed, cut, truncated or swapped out."""

import numpy as np
import pytest

from outrider.drafters.interface import EMPTY, Ints, Source, chain
from outrider.drafters.none import NoDrafter
from outrider.verify.decode import step
from outrider.verify.model.torch_runner import TorchRunner
from outrider.verify.sampling_params import SamplingParams
from outrider.verify.stream import DecodeOptions, Stream
from outrider.verify.verifier import Verifier

PROMPT = np.array([5, 17, 42, 5, 17], np.int32)
GREEDY = SamplingParams(temperature=0)


def started(runner: TorchRunner, prompt: Ints = PROMPT, params: SamplingParams = GREEDY) -> Verifier:
    """A verifier that has read a prompt."""
    verifier = Verifier(runner, runner.new_cache())
    verifier.begin(prompt, params, max_tokens=100)
    verifier.prefill()
    return verifier


def plain(verifier: Verifier, count: int) -> list[int]:
    """The next `count` tokens of plain decoding."""
    for _ in range(count):
        verifier.commit(verifier.verify(EMPTY))
    return [int(token) for token in verifier.sequence.answer[-count:]]


@pytest.mark.parametrize("count", [1, 2, 4, 5])
def test_a_cut_verdict_leaves_the_text_and_cache_of_plain_decoding(tiny_runner: TorchRunner, count: int) -> None:
    expected = plain(started(tiny_runner), 9)
    verifier = started(tiny_runner)
    draft = chain(np.array(expected[:4], np.int32), np.full(4, 0.5, np.float32), Source.LOOKUP)
    verifier.commit(verifier.verify(draft).cut(count))
    assert verifier.sequence.answer.tolist() == expected[:count]
    assert plain(verifier, 4) == expected[count : count + 4]


def test_prompt_logprobs_cover_the_whole_prompt(tiny_runner: TorchRunner) -> None:
    verifier = started(tiny_runner)
    assert verifier.prompt_logprobs is None
    params = SamplingParams(temperature=0, logprobs=3)
    assert verifier.begin(PROMPT, params, max_tokens=1, wants_prompt_logprobs=True) == 0
    verifier.prefill()
    scores = verifier.prompt_logprobs
    assert scores is not None
    assert scores.chosen.shape == (len(PROMPT) - 1,)
    assert scores.top_ids.shape == (len(PROMPT) - 1, 3)
    assert (scores.chosen <= scores.top[:, 0] + 1e-6).all()


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
