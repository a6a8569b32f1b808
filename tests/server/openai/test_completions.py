"""Completions: the format of answers and chunks, echoes and `best_of`; usage and traces, of chats and responses, too."""

from typing import Any

import pytest

from outrider.server.engine.messages import StepReport, TokenEvent
from outrider.server.openai.usage import Usage
from tests.server.fakes import FIRST_TOKEN, FakeEngine, events, post

PATH = "/v1/completions"


def test_best_of_returns_the_most_likely() -> None:
    engine = FakeEngine("a")
    answer = post(engine, PATH, {"prompt": "x", "best_of": 3, "n": 1}).json()
    assert [choice["text"] for choice in answer["choices"]] == ["a!!"]  # the last candidate has the highest log-probability
    assert answer["choices"][0]["logprobs"] is None  # computed, but not requested
    assert len(engine.requests) == 3


def test_the_echo_precedes_the_text_and_has_logprobs() -> None:
    answer = post(FakeEngine("ab"), PATH, {"prompt": ["x = 1", "y"], "echo": True, "logprobs": 1}).json()
    first, second = answer["choices"]
    assert (first["text"], second["text"]) == ("x = 1ab", "yab")
    found = first["logprobs"]
    assert found["token_logprobs"][:2] == [None, -1.0]
    assert found["top_logprobs"][0] is None
    assert found["text_offset"][-1] == len("x = 1")


def test_offsets_of_an_echo_of_several_bytes_per_character_are_in_the_text() -> None:
    prompt = "a 🧑‍🚀 b 龘 c"
    answer = post(FakeEngine("d"), PATH, {"prompt": prompt, "echo": True, "logprobs": 5}).json()
    [choice] = answer["choices"]
    offsets, tokens = choice["logprobs"]["text_offset"], choice["logprobs"]["tokens"]
    assert offsets == sorted(offsets) and offsets[-1] == len(prompt) and len(offsets) == len(tokens)
    whole = {token: offset for token, offset in zip(tokens[:-1], offsets, strict=False) if not token.startswith("bytes:")}
    assert all(prompt.startswith(token, offset) for token, offset in whole.items()) and " b" in whole


def test_streams_of_several_prompts_number_their_choices() -> None:
    engine = FakeEngine("a", "b")
    *chunks, done = events(post(engine, PATH, {"prompt": ["x", "y"], "n": 2, "stream": True}))
    assert done == "[DONE]"
    texts = {index: "" for index in range(4)}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == {0: "ab", 1: "ab!", 2: "ab", 3: "ab!"}
    assert engine.admitted == [False, True, True, True]  # the later choices belong to an accepted request


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"prompt": ["x"] * 65}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"suffix": "z"}, "suffix"),
    ],
)
def test_invalid_completions_are_rejected(fields: dict[str, Any], param: str) -> None:
    response = post(FakeEngine("x"), PATH, {"prompt": "x", **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("path", "prompt"),
    [("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})],
)
def test_each_step_has_one_trace(path: str, prompt: dict[str, Any]) -> None:
    """Also steps without text, such as the second, and the last."""
    body = prompt | {"stream": True, "n": 2, "session_id": "s"}
    chunks = events(post(FakeEngine("a", "", "b"), path, body | {"speculation": {"trace": True}}))
    for index in (0, 1):
        choices = [choice for chunk in chunks[:-1] for choice in chunk["choices"] if choice["index"] == index]
        traces = [choice["trace"] for choice in choices if "trace" in choice]
        assert [trace["draft"]["tokens"][trace["accepted"][0]] for trace in traces] == [FIRST_TOKEN + i for i in range(4)]
    plain = events(post(FakeEngine("a"), path, body))
    assert not any("trace" in choice for chunk in plain[:-1] for choice in chunk["choices"])


def usage() -> Usage:
    made = Usage(prompt_tokens=5, cached_tokens=2)
    made.record_event(TokenEvent("r", [1], "a"))  # without a step
    step = StepReport(0.1, 0.1, 0.1, {"prediction": 4, "trigram": 2}, {"prediction": 3})
    made.record_event(TokenEvent("r", [1, 2, 3, 4], "b", step=step))
    return made


def test_chats_and_completions() -> None:
    body = usage().completion_body(reasoning_tokens=2)
    assert (body["prompt_tokens"], body["completion_tokens"], body["total_tokens"]) == (5, 5, 10)
    assert body["prompt_tokens_details"]["cached_tokens"] == 2
    details = body["completion_tokens_details"]
    assert (details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]) == (3, 1)
    assert details["reasoning_tokens"] == 2


def test_responses() -> None:
    body = usage().response_body(reasoning_tokens=2)
    assert (body["input_tokens"], body["output_tokens"], body["total_tokens"]) == (5, 5, 10)
    assert body["input_tokens_details"]["cached_tokens"] == 2
    assert body["output_tokens_details"] == {"reasoning_tokens": 2}
