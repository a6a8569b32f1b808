"""The drafts in the chunks of chats and completions."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.server.engine.messages import StepReport, StepTrace
from outrider.server.openai.trace import trace_body
from tests.server.fakes import FIRST_TOKEN, VOCABULARY, FakeEngine, events, post


def test_the_body_has_texts_and_times() -> None:
    trace = StepTrace([40, 41], [-1, 0], [0.98765, 0.5], ["trigram", "lookup"], [0], 42, 24, 1.63215, 1.21)
    assert trace_body(VOCABULARY, StepReport(1e-4, 2e-3, 3e-5, {}, {}), trace) == {
        "draft": {
            "tokens": [40, 41],
            "texts": [VOCABULARY.text_of(40), VOCABULARY.text_of(41)],
            "parents": [-1, 0],
            "probabilities": [0.9877, 0.5],
            "sources": ["trigram", "lookup"],
        },
        "accepted": [0],
        "bonus": {"token": 42, "text": VOCABULARY.text_of(42)},
        "proposed": 24,
        "expected_tokens": 1.632,
        "gain": 1.21,
        "draft_ms": 0.1,
        "verify_ms": 2.0,
        "commit_ms": 0.03,
    }


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
