"""transformers' `generate` in this process, plain and with prompt lookup."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer
from transformers.utils.logging import set_verbosity_error

from bench.live.setup import LivePeer, Setup
from bench.model.peers import PeerName, Transformers
from bench.peers.hugging_face import NAME, PLAIN
from bench.peers.peer import Answer, Question

LOOKUP = "lookup"
NAMES: Mapping[str, PeerName] = {PLAIN: "transformers", LOOKUP: "transformers-lookup"}


class Arrivals(BaseStreamer):  # type: ignore[misc]
    """Notes when tokens arrive; the first piece is the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Required by transformers; nothing to do."""


class TransformersChat(LivePeer):
    """`generate` over the tokens of the rendered chat."""

    name, transport = NAME, "in process"
    methods: Sequence[str] = tuple(NAMES)

    def __init__(self, setup: Setup, stack: ExitStack) -> None:
        set_verbosity_error()  # generate warns at every call
        torch.set_num_threads(setup.threads)
        self._model = Transformers(setup.model_folder, getattr(torch, setup.dtype), torch.device("cpu"), None)

    def answer(self, method: str, question: Question) -> Answer:
        arrivals, started = Arrivals(), time.perf_counter()
        asked = (question.ids, question.temperature, question.max_tokens, question.seed)
        tokens, seconds = self._model.answer(NAMES[method], *asked, streamer=arrivals)
        _, *times = arrivals.times
        return Answer(len(tokens), seconds, tokens, len(times), times[0] - started)
