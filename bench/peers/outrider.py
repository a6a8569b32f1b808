"""Outrider itself, in process and as a server; its methods are the chosen drafters."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import cast

import httpx
import torch

from bench import decode
from bench.http.process import start_server
from bench.peers.peer import Answer, Peer, Question, Weights
from bench.peers.server import TIMEOUT_SECONDS, complete
from bench.plan import Plan
from outrider.drafters.options import DrafterName
from outrider.server.worker.runtime import load

NAME = "outrider"
# No request learns from an earlier one, and there are no defaults that the others do not know.
SERVER_FLAGS = ("--model.generation_config", "none", "--sessions.automatic", "off")


class OutriderInProcess(Peer):
    """Outrider in this process; each answer starts with fresh state."""

    name, transport = NAME, "in process"

    def __init__(self, weights: Weights, stack: ExitStack) -> None:
        self.methods: Sequence[str] = weights.drafters
        self._settings = weights.settings
        self._runtime = load(weights.settings)
        torch.set_num_threads(weights.threads)

    def answer(self, method: str, question: Question) -> Answer:
        plan = Plan([], [], [], question.max_tokens, 1, question.seed)
        drafter = cast(DrafterName, method)
        started = time.perf_counter()
        decoded = decode.answer(self._runtime, self._settings, drafter, question.ids, question.temperature, plan)
        return Answer(len(decoded.tokens), time.perf_counter() - started, decoded.tokens, len(decoded.steps))


class OutriderServer(Peer):
    """`outrider serve`."""

    name, transport = NAME, "HTTP"

    def __init__(self, weights: Weights, stack: ExitStack) -> None:
        self.methods: Sequence[str] = weights.drafters
        server = stack.enter_context(start_server([*weights.flags, *SERVER_FLAGS]))
        self._client = stack.enter_context(httpx.Client(base_url=server.url, timeout=TIMEOUT_SECONDS))
        self._model = self._client.get("/v1/models").json()["data"][0]["id"]

    def answer(self, method: str, question: Question) -> Answer:
        fields = {"prompt": question.prompt, "max_tokens": question.max_tokens, "temperature": question.temperature}
        fields |= {"model": self._model, "seed": question.seed, "speculation": {"drafter": method}}
        return complete(self._client, fields)
