"""llama-server, plain and with each of its kinds of n-gram speculation."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from bench.live.chat import ask, fields_of
from bench.live.llama_server import KINDS, PLAIN
from bench.live.setup import LivePeer, Setup
from bench.peers.llama import CONVERTER, NAME, SAMPLING
from bench.peers.peer import Answer, Question
from bench.peers.server import start


class LlamaChat(LivePeer):
    """The server in the package xllamacpp; a process for each kind of speculation, since a request cannot choose it."""

    name, transport = NAME, "HTTP"
    packages = CONVERTER | {"xllamacpp": "xllamacpp"}
    methods: Sequence[str] = (PLAIN, *KINDS)

    def __init__(self, setup: Setup, stack: ExitStack) -> None:
        common = ["bench.live.llama_server", "--model", str(setup.gguf_path)]
        common += ["--context", str(setup.context_tokens), "--threads", str(setup.threads)]
        self._servers = {
            method: stack.enter_context(start("llama-server", [*common, "--speculation", method], "/health", {}))
            for method in self.methods
        }

    def answer(self, method: str, question: Question) -> Answer:
        with self._servers[method].running() as client:
            return ask(client, {**fields_of(question), **SAMPLING})
