"""Questions to the real model, and comparisons of its answers."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from typing import Any

from tests.requests import complete
from tests.servers import Served

CAPITAL = "What is the capital of France?"
QUESTIONS = (
    "List five fruits, with one sentence about each of them.",
    "Write a Python function that reads a file, and explain it.",
    "Tell me a story about a fox and a hen who are friends.",
)
SAMPLING: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0}, "sampled": {"temperature": 0.8, "seed": 7}}
TOKENS = 32
NODES = 12  # of a request whose drafts are verified whatever the server's measured costs say
Budget = dict[str, int]


def budgets() -> Iterator[Budget]:
    """Speculation fields of request after request: the server's own budget, and a fixed one."""
    return cycle(({}, {"max_nodes": NODES}))


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


class Comparison:
    """Answers of a server with drafts, compared with its plain ones, which are asked for once."""

    def __init__(self, server: Served, as_chat: bool = True) -> None:
        """`as_chat` is False for models without a chat template, which continue a text."""
        self.server = server
        self._as_chat = as_chat
        self._plain: dict[tuple[str, str], list[int]] = {}

    def plain(self, content: str, sampling: str) -> list[int]:
        """The token ids of an answer that is decoded without drafts."""
        case = (content, sampling)
        if case not in self._plain:
            tokens, report = self.answer(content, sampling, {"drafter": "none"}, {})
            assert report["steps"] == len(tokens) > 3
            self._plain[case] = tokens
        return self._plain[case]

    def check(self, content: str, sampling: str, drafter: str, budget: Budget, **fields: Any) -> int:
        """Asserts that a drafted answer is the plain one; returns its number of accepted tokens."""
        expected = self.plain(content, sampling)
        drafted, report = self.answer(content, sampling, {"drafter": drafter, **budget}, fields)
        assert drafted == expected
        accepted = int(sum(report["accepted_tokens"].values()))
        # Each step adds a bonus token, except the last one if a drafted token ends the answer.
        assert accepted - (len(drafted) - report["steps"]) in (0, 1)
        return accepted

    def check_company(self, sampling: str) -> int:
        """Asserts that answers drafted side by side by the default drafter are those decoded one by one without drafts.

        Returns the number of accepted tokens.
        """
        questions = (CAPITAL, *QUESTIONS)
        for question in questions:
            self.plain(question, sampling)
        with ThreadPoolExecutor(len(questions)) as pool:
            accepted = pool.map(lambda question, budget: self.check(question, sampling, "fusion", budget), questions, budgets())
            return sum(accepted)

    def answer(
        self, content: str, sampling: str, speculation: dict[str, Any], fields: dict[str, Any]
    ) -> tuple[list[int], dict[str, Any]]:
        """The token ids of an answer, and the report on its drafts."""
        asked = {**SAMPLING[sampling], "max_tokens": TOKENS, "return_token_ids": True, **fields}
        asked["speculation"] = {**speculation, "report": True}
        found = chat(self.server, content, **asked) if self._as_chat else complete(self.server, prompt=content, **asked)
        return found["choices"][0]["token_ids"], found["speculation"]
