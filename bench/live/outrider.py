"""`outrider serve`, as a user starts it; its methods are the chosen drafters."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from contextlib import ExitStack

import httpx
from rich.console import Console

from bench.http.process import start_server
from bench.live.chat import ask, fields_of
from bench.live.setup import LivePeer, Setup
from bench.peers.outrider import NAME, SERVER_FLAGS
from bench.peers.peer import Answer, Question
from bench.peers.server import TIMEOUT_SECONDS

DRAFTERS_SECONDS = 180  # to wait for the drafters' kernels, which the first start on a machine compiles
LEARNING_FLAGS = ("--model.generation_config", "none", "--sessions.automatic", "on", "--sessions.learn", "key")
WARM_UP = "warm-up"


class OutriderChat(LivePeer):
    """Outrider's server. Without `learn` every question is a new session, and nothing of another one is used.

    With it, each drafter learns at each temperature from its own earlier answers only: it has an API key of its own.
    """

    name, transport = NAME, "HTTP"

    def __init__(self, setup: Setup, stack: ExitStack) -> None:
        self.methods: Sequence[str] = setup.drafters
        names = [WARM_UP, *(key_name(method, each) for method in self.methods for each in setup.temperatures)]
        self._keys = {name: secrets.token_urlsafe() for name in names} if setup.learn else {}
        flags = [*setup.flags, *SERVER_FLAGS]
        if setup.learn:
            file = setup.folder / "keys.yaml"
            file.write_text(json.dumps(self._keys))
            flags = [*setup.flags, *LEARNING_FLAGS, "--auth.file", str(file)]
        server = stack.enter_context(start_server(flags))
        client = httpx.Client(base_url=server.url, timeout=TIMEOUT_SECONDS, headers=self._headers(WARM_UP))
        self._client = stack.enter_context(client)
        self._model = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
        self._wait_for_drafters()

    def answer(self, method: str, question: Question) -> Answer:
        report = {"drafter": method, "report": True}
        fields = fields_of(question) | {"model": self._model, "return_token_ids": True, "speculation": report}
        return ask(self._client, fields, self._headers(key_name(method, question.temperature)))

    def _headers(self, name: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._keys[name]}"} if self._keys else {}

    def _wait_for_drafters(self) -> None:
        """Waits until the drafters' kernels are compiled: until then, another drafter stands in, and compiling takes a core."""
        deadline = time.monotonic() + DRAFTERS_SECONDS
        while not self._client.get("/version").raise_for_status().json().get("drafting"):
            if time.monotonic() > deadline:
                Console(stderr=True).print(
                    f"The drafters were not ready in {DRAFTERS_SECONDS} s; answers may have other drafts."
                )
                return
            time.sleep(1)


def key_name(method: str, temperature: float) -> str:
    """The name of the API key of a drafter at a temperature."""
    return f"{method}-{temperature:g}"
