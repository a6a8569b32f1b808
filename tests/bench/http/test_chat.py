"""A streamed answer is timed and counted from its chunks."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from bench.http.chat import ask, read
from bench.plan import BenchError


def piece(**chunk: Any) -> bytes:
    return b"data: " + json.dumps({"choices": [], **chunk}).encode() + b"\n\n"


def delta(content: str | None, ids: list[int] | None = None) -> dict[str, Any]:
    return {"delta": {"content": content}} | ({"token_ids": ids} if ids else {})


USAGE = {"completion_tokens": 5, "prompt_tokens": 9}


def test_outriders_stream() -> None:
    last = piece(usage=USAGE, speculation={"steps": 3})
    arrived = [
        (0.1, piece(choices=[delta("")])),  # the role
        (0.2, piece(choices=[delta("a", [7])])[:12]),
        (0.3, piece(choices=[delta("a", [7])])[12:] + piece(choices=[delta("bcd", [8, 9, 10])])),
        (0.5, piece(choices=[delta(None, [2])]) + last + b"data: [DONE]\n\n"),
    ]
    answer = read(arrived)
    assert (answer.tokens, answer.ids, answer.steps, answer.text) == (5, [7, 8, 9, 10, 2], 3, "abcd")
    assert (answer.first_token_seconds, answer.seconds, answer.prompt_tokens) == (0.3, 0.5, 9)


def test_llama_servers_steps_are_the_tokens_that_were_not_drafted() -> None:
    arrived = [(0.1, piece(choices=[delta("a")])), (0.2, piece(usage=USAGE, timings={"draft_n": 8, "draft_n_accepted": 2}))]
    answer = read(arrived)
    assert (answer.tokens, answer.ids, answer.steps) == (5, None, 3)


def test_reasoning_and_calls_of_tools_are_text() -> None:
    call = {"index": 0, "function": {"name": "read", "arguments": "{}"}}
    deltas = [{"reasoning_content": "Hm.", "content": None}, {"tool_calls": [call]}]
    arrived = [(0.1, b"".join(piece(choices=[{"delta": each}]) for each in deltas)), (0.2, piece(usage=USAGE))]
    answer = read(arrived)
    assert (answer.text, answer.steps) == ("Hm.read{}", None)


def test_an_answer_of_the_end_token_alone_has_its_first_token_at_the_end() -> None:
    usage = {"completion_tokens": 1, "prompt_tokens": 9}
    assert read([(0.1, piece(choices=[delta("")])), (0.4, piece(usage=usage))]).first_token_seconds == 0.4


def test_what_is_no_answer_is_reported() -> None:
    with pytest.raises(BenchError, match="an error: lost"):
        read([(0.1, piece(error={"message": "lost"}))])
    with pytest.raises(BenchError, match="without its usage"):
        read([(0.1, b"data: [DONE]\n\n")])
    client = httpx.Client(
        base_url="http://server", transport=httpx.MockTransport(lambda _: httpx.Response(503, text="loading"))
    )
    with pytest.raises(BenchError, match="503: loading"):
        ask(client, {})
