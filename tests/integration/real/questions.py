"""Questions to the real model."""

from __future__ import annotations

from typing import Any

from tests.servers import Served

CAPITAL = "What is the capital of France?"
QUESTIONS = (
    "List five fruits, with one sentence about each of them.",
    "Write a Python function that reads a file, and explain it.",
    "Tell me a story about a fox and a hen who are friends.",
)
SAMPLING: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0}, "sampled": {"temperature": 0.8, "seed": 7}}


def chat(server: Served, content: str, **fields: Any) -> dict[str, Any]:
    """The answer to a message, greedy unless `fields` say otherwise; `messages` go before it."""
    messages = [*fields.pop("messages", []), {"role": "user", "content": content}]
    body = {"model": server.model, "messages": messages, "temperature": 0, **fields}
    response = server.http.post("/v1/chat/completions", json=body, timeout=280)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def text(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])
