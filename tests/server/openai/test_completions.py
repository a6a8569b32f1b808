"""Completions: the format of answers and chunks, echoes, and `best_of`."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.fakes import FakeEngine, events, post

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
