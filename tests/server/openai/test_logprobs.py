"""Log-probabilities in both formats: bytes are exact, there is no infinity, and echoes have offsets."""

import json
import math

from outrider.server.engine.messages import TokenLogprobs
from outrider.server.openai.generation import ChoiceOutput
from outrider.server.openai.logprobs import MIN_LOGPROB, completion_logprobs, content_logprobs
from tests.server.fakes import VOCABULARY


def output(echoed_tokens: int = 0) -> ChoiceOutput:
    """Three tokens; the last one, a stop token, has no log-probability."""
    logprobs = TokenLogprobs([-0.5, -math.inf], [[40], [42, 41]], [[-0.5], [-0.1, -math.inf]])
    return ChoiceOutput(0, tokens=[40, 41, 0], logprobs=logprobs, offset=10, echoed_tokens=echoed_tokens)


def test_content_logprobs() -> None:
    first, second = content_logprobs(VOCABULARY, output())
    assert bytes(first["bytes"]) == VOCABULARY.bytes_of(40)
    assert (first["logprob"], second["logprob"]) == (-0.5, MIN_LOGPROB)
    assert [top["token"] for top in second["top_logprobs"]] == [VOCABULARY.text_of(42), VOCABULARY.text_of(41)]
    json.dumps(second, allow_nan=False)


def test_completion_logprobs() -> None:
    found = completion_logprobs(VOCABULARY, output())
    assert found["tokens"] == [VOCABULARY.text_of(40), VOCABULARY.text_of(41)]
    assert found["text_offset"] == [10, 10 + len(VOCABULARY.text_of(40))]
    assert found["token_logprobs"] == [-0.5, MIN_LOGPROB]
    assert found["top_logprobs"][1] == {VOCABULARY.text_of(42): -0.1, VOCABULARY.text_of(41): MIN_LOGPROB}


def test_an_echoed_first_token_has_no_logprob() -> None:
    found = completion_logprobs(VOCABULARY, output(echoed_tokens=2))
    assert found["token_logprobs"] == [None, MIN_LOGPROB]
    assert found["top_logprobs"][0] is None


def test_without_logprobs_there_are_no_entries() -> None:
    assert content_logprobs(VOCABULARY, ChoiceOutput(0, tokens=[40])) == []
