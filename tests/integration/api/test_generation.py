"""Chats and completions: JSON and streamed answers, stop strings, usage and choices."""

from __future__ import annotations

from typing import Any

from tests.requests import MESSAGES, body, complete, events, text
from tests.servers import Served


def test_a_chat_stream_adds_up_to_the_answer(served: Served) -> None:
    common: Any = {"model": served.model, "messages": MESSAGES, "max_tokens": 60, "temperature": 0.9, "seed": 4}
    full = served.client.chat.completions.create(**common)
    chunks = list(served.client.chat.completions.create(**common, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == full.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == full.choices[0].finish_reason
    assert chunks[-1].choices == []
    assert chunks[-1].usage == full.usage
    assert all(c.usage is None for c in chunks[:-1])


def test_stop_strings_are_cut_exactly(served: Served) -> None:
    full = text(complete(served, max_tokens=80))
    stop = full[25:28]
    expected = full[: full.index(stop)]
    for drafter in ("none", "trigram"):
        answer = complete(served, max_tokens=80, stop=["never there", stop], speculation={"drafter": drafter})
        assert text(answer) == expected
        assert answer["choices"][0]["finish_reason"] == "stop"
    stream = events(served, "/v1/completions", body(served, max_tokens=80, stop=stop, stream=True))
    assert "".join(chunk["choices"][0]["text"] for chunk in stream[:-1]) == expected


def test_each_choice_has_its_own_seed(served: Served) -> None:
    fields = {"n": 3, "temperature": 1, "seed": 5, "max_tokens": 30}
    answer = complete(served, **fields)
    texts = [choice["text"] for choice in answer["choices"]]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert texts[0] == text(complete(served, **fields | {"n": 1}))
    assert answer["usage"]["completion_tokens"] <= 90
    stream = events(served, "/v1/completions", body(served, **fields, stream=True))
    for index in range(3):
        parts = [chunk["choices"][0]["text"] for chunk in stream[:-1] if chunk["choices"][0]["index"] == index]
        assert "".join(parts) == texts[index]
