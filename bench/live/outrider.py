"""`outrider serve`, as a user starts it; its methods are the chosen drafters."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from bench.http.chat import Answer, ask
from bench.http.process import start_server
from bench.live.figures import OUTRIDER
from bench.live.setup import LivePeer, Question, Setup

# No request learns from an earlier one, and there are no defaults that the others do not know.
SERVER_FLAGS = ("--model.generation_config", "none", "--sessions.automatic", "off")


class OutriderChat(LivePeer):
    """Outrider's server. Every question is a new session, and nothing of another one is used."""

    name, transport = OUTRIDER, "HTTP"

    def __init__(self, setup: Setup, stack: ExitStack) -> None:
        self.methods: Sequence[str] = setup.choice.drafters
        self._client = stack.enter_context(start_server([*setup.flags, *SERVER_FLAGS])).client
        self._model = self._client.get("/v1/models").raise_for_status().json()["data"][0]["id"]

    def answer(self, method: str, item: Question) -> Answer:
        report = {"drafter": method, "report": True}
        fields: dict[str, Any] = {"messages": [{"role": "user", "content": item.prompt}], "max_tokens": item.max_tokens}
        fields |= {"temperature": item.temperature, "seed": item.seed}
        return ask(self._client, fields | {"model": self._model, "return_token_ids": True, "speculation": report})
