"""llama-server, plain and with each of its kinds of n-gram speculation."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from bench.http.process import start
from bench.live.chat import ask, fields_of
from bench.live.llama_server import KINDS, PLAIN
from bench.live.setup import LivePeer, Question, Setup
from bench.live.turns import Answer

PACKAGES = {"gguf": "gguf", "xllamacpp": "xllamacpp"}
WHOLE_DISTRIBUTION = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0}


class LlamaChat(LivePeer):
    """The server in the package xllamacpp; a process for each kind of speculation, since a request cannot choose it."""

    name, transport = "llama.cpp", "HTTP"
    packages = PACKAGES
    methods: Sequence[str] = (PLAIN, *KINDS)

    def __init__(self, setup: Setup, stack: ExitStack) -> None:
        common = ["bench.live.llama_server", "--model", str(setup.gguf_path)]
        common += ["--context", str(setup.context_tokens), "--threads", str(setup.threads)]
        self._servers = {
            method: stack.enter_context(start([*common, "--speculation", method], "/health", paused=True))
            for method in self.methods
        }

    def answer(self, method: str, item: Question) -> Answer:
        with self._servers[method].running() as client:
            return ask(client, fields_of(item) | WHOLE_DISTRIBUTION)
