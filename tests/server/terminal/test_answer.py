"""An answer: its text, without control characters, and its cost."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.server.terminal.answer import Answer
from outrider.server.terminal.client import ChatError

USAGE: dict[str, Any] = {
    "usage": {"completion_tokens": 4, "prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 3}},
    "speculation": {
        "steps": 2,
        "mean_tokens_per_step": 2.0,
        "drafted_tokens": {"trigram": 5, "lookup": 1},
        "accepted_tokens": {"trigram": 2},
    },
    "choices": [],
}


def chunk(content: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": content}, **fields}]}


def test_text_is_shown_as_it_arrives() -> None:
    shown: list[str] = []
    answer = Answer(shown.append, clock=iter([0.0, 0.5, 2.0]).__next__)
    answer.receive(iter([chunk(""), chunk("a"), chunk("b"), {**chunk(), "usage": None}, USAGE]))
    assert (shown, answer.text) == (["a", "b"], "ab")
    assert answer.stats().splitlines() == [
        "4 tokens in 2.00 s, 2 tokens/s, first text after 500 ms",
        "9 prompt tokens, 3 of them cached",
        "2 steps, 2.00 tokens per step",
        "accepted drafts: trigram 2 of 5, lookup 0 of 1",
    ]


def test_control_characters_do_not_reach_the_terminal() -> None:
    shown: list[str] = []
    Answer(shown.append).receive(iter([chunk("a\x1b[2J\x07\u009b\n\tb")]))
    assert shown == ["a[2J\n\tb"]


@pytest.mark.parametrize(
    "malformed",
    [{}, {"choices": None}, {"choices": [{}]}, {"choices": [{"delta": None}]}, {"choices": ["a"]}],
)
def test_a_chunk_of_another_form_is_an_error(malformed: dict[str, Any]) -> None:
    answer = Answer(lambda _: None)
    with pytest.raises(ChatError, match="no part of a chat completion"):
        answer.receive(iter([chunk("a"), malformed]))
    assert answer.text == "a"


def test_control_characters_of_the_cost_do_not_reach_the_terminal() -> None:
    answer = Answer(lambda _: None)
    answer.receive(iter([USAGE | {"speculation": USAGE["speculation"] | {"drafted_tokens": {"\x1b[2Jx": 1}}}]))
    assert answer.stats().endswith("accepted drafts: [2Jx 0 of 1")
