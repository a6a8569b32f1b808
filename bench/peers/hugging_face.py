"""transformers: `generate` in process, plain, with prompt lookup and with an assistant model, and `transformers serve`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import torch
from transformers import GenerationConfig
from transformers.utils.logging import set_verbosity_error

from bench.model.peers import Transformers
from bench.peers.peer import KINDS, Answer, Peer, Question, Weights
from bench.peers.server import complete, start
from outrider.verify.tokenizer import load_tokenizer

NAME = "transformers"
PLAIN = "plain"
FULL_BITS = (32, 16)  # it quantises on a CPU only with further packages


class TransformersInProcess(Peer):
    """`generate` in this process."""

    name, transport, bits = NAME, "in process", FULL_BITS

    def __init__(self, weights: Weights, stack: ExitStack) -> None:
        dtype = getattr(torch, KINDS[weights.bits].dtype)
        set_verbosity_error()  # generate warns at every call
        self._model = Transformers(weights.path, dtype, torch.device("cpu"), weights.draft)
        self._names = {name.removeprefix(f"{NAME}-").replace(NAME, PLAIN): name for name in self._model.names}
        self.methods: Sequence[str] = tuple(self._names)

    def answer(self, method: str, question: Question) -> Answer:
        name = self._names[method]
        tokens, seconds = self._model.answer(name, question.ids, question.temperature, question.max_tokens, question.seed)
        return Answer(len(tokens), seconds, tokens)


class TransformersServer(Peer):
    """`transformers serve`."""

    name, transport, bits = NAME, "HTTP", FULL_BITS
    packages = dict.fromkeys(("fastapi", "uvicorn", "openai"), "'transformers[serving]'")
    methods = (PLAIN,)  # a request cannot ask for prompt lookup

    def __init__(self, weights: Weights, stack: ExitStack) -> None:
        arguments = ["transformers.cli.transformers", "serve", weights.path, "--device", "cpu"]
        arguments += ["--dtype", KINDS[weights.bits].dtype]
        environment = {"OMP_NUM_THREADS": str(weights.threads), "HF_HUB_OFFLINE": "1"}
        self._model = weights.path
        self._end: int = load_tokenizer(weights.path).eos_token_id
        self._server = stack.enter_context(start("transformers serve", arguments, "/health", environment))

    def answer(self, method: str, question: Question) -> Answer:
        options = GenerationConfig(
            max_new_tokens=question.max_tokens,
            do_sample=question.temperature > 0,
            temperature=question.temperature or None,
            top_k=0 if question.temperature > 0 else None,
            eos_token_id=self._end,
            pad_token_id=self._end,
        )
        fields = {"model": self._model, "prompt": question.prompt, "max_tokens": question.max_tokens, "seed": question.seed}
        with self._server.running() as client:
            return complete(client, fields | {"generation_config": options.to_json_string()})
