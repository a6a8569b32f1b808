"""Bodies: strict types, unsupported fields by name, and the conversion to sampling parameters."""

from __future__ import annotations

import math
from typing import Any

import pytest
from pydantic import ValidationError

from outrider.server.openai.schema import MIN_TOP_P, ChatBody, CompletionBody


def completion(**fields: Any) -> CompletionBody:
    return CompletionBody.model_validate({"model": "m", "prompt": "x", **fields})


def chat(**fields: Any) -> ChatBody:
    return ChatBody.model_validate({"model": "m", "messages": [{"role": "user", "content": "x"}], **fields})


def test_every_field_reaches_the_sampling_parameters() -> None:
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": -1, "min_tokens": 2, "ignore_eos": True}
    fields |= {"presence_penalty": 1, "frequency_penalty": -1, "repetition_penalty": 1.5, "logprobs": 3}
    params = completion(**fields, logit_bias={"40": -2}).sampling_params()
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 7, 0.1)
    assert (params.seed, params.min_tokens, params.ignore_eos) == ((1 << 64) - 1, 2, True)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (1.0, -1.0, 1.5)
    assert (params.logit_bias, params.logprobs) == ({40: -2.0}, 3)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"temperature": 3}, "less than or equal to 2"),
        ({"functions": [1]}, "'functions' is not supported"),
        ({"response_format": {"type": "json_schema"}}, "'json_schema' is required"),
        ({"speculation": {"max_nodes": 129}}, "less than or equal to 128"),
        ({"logit_bias": {"1" * 5000: 1}}, "keys must be token ids, not '11111111111111111111'"),
        ({"logit_bias": {"1": 101}}, "values must be numbers from -100 to 100"),
        ({"logit_bias": {"1": True}}, "values must be numbers from -100 to 100"),
        ({"repetition_penalty": 1e-46}, "greater than or equal to 0.01"),
        ({"metadata": {str(number): "" for number in range(17)}}, "at most 16 pairs are allowed, not 17"),
        ({"metadata": {"x": "y" * 513}}, "value may have at most 512 characters"),
        ({"prompt": {"x": 1}}, "a string, a list of strings, or token ids"),
    ],
)
def test_invalid_fields_are_rejected(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        completion(**fields)


@pytest.mark.parametrize("value", [5e-324, 1e-46, 1e-40, 1e-6])
def test_tiny_numbers_are_sampled_as_their_limit(value: float) -> None:
    params = completion(temperature=value, top_p=value, min_p=value, presence_penalty=value).sampling_params()
    assert params.greedy and params.top_p == MIN_TOP_P
    assert completion(temperature=1e-5).sampling_params().temperature == 1e-5
    for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
        for odd in (math.inf, -math.inf, math.nan, 10**400):
            with pytest.raises(ValidationError):
                completion(**{name: odd})


def test_logprobs() -> None:
    assert (chat().num_logprobs, chat(logprobs=True).num_logprobs) == (None, 0)
    assert chat(logprobs=True, top_logprobs=4).num_logprobs == 4
    ranked = completion(best_of=3)
    assert (ranked.num_logprobs, ranked.returns_logprobs, ranked.candidates) == (0, False, 3)
    assert not completion(echo=True).returns_prompt_logprobs
    assert completion(echo=True, logprobs=0).returns_prompt_logprobs
