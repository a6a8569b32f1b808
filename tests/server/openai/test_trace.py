"""The drafts in the chunks of chats and completions."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.fakes import FIRST_TOKEN, FakeEngine, events, post


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
