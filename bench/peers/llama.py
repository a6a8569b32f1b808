"""llama.cpp through llama-cpp-python, plain and with its own n-gram drafts ("prompt lookup"), in process and as a server."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.peers.peer import Answer, Peer, Question, Weights
from bench.peers.server import complete, start

if TYPE_CHECKING:
    from bench.peers.llama_model import Model

NAME = "llama.cpp"
PLAIN, LOOKUP = "plain", "lookup"
CONVERTER = {"gguf": "gguf"}
SERVER_MODULES = ("llama_cpp", "starlette_context", "sse_starlette")
SAMPLING: Mapping[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0}  # of the whole distribution


def open_models(file: Path, context_tokens: int, threads: int, stack: ExitStack) -> dict[str, Model]:
    """A model for each method, until the stack is closed. Needs llama-cpp-python."""
    from bench.peers.llama_model import Model

    return {
        method: stack.enter_context(Model.opened(file, context_tokens, threads, drafts=method == LOOKUP))
        for method in (PLAIN, LOOKUP)
    }


class LlamaInProcess(Peer):
    """`Llama.generate` in this process."""

    name, transport = NAME, "in process"
    packages = CONVERTER | {"llama_cpp": "llama-cpp-python"}
    methods = (PLAIN, LOOKUP)

    def __init__(self, weights: Weights, stack: ExitStack) -> None:
        self._models = open_models(weights.gguf, weights.context_tokens, weights.threads, stack)

    def answer(self, method: str, question: Question) -> Answer:
        model = self._models[method]
        model.begin()
        tokens: list[int] = []
        started = time.perf_counter()
        for token in model.generate(question.ids.tolist(), temp=question.temperature, **SAMPLING):
            tokens.append(token)
            if token == model.token_eos() or len(tokens) == question.max_tokens:
                break
        return Answer(len(tokens), time.perf_counter() - started, tokens, model.evaluations)


class LlamaServer(Peer):
    """`python -m llama_cpp.server`, a process for each method. Prompts are tokenized by the model's own tokenizer."""

    name, transport = NAME, "HTTP"
    packages = CONVERTER | dict.fromkeys(SERVER_MODULES, "'llama-cpp-python[server]'")
    methods = (PLAIN, LOOKUP)

    def __init__(self, weights: Weights, stack: ExitStack) -> None:
        threads = str(weights.threads)
        common = ["--model", str(weights.gguf), "--n_ctx", str(weights.context_tokens), "--verbose", "false"]
        common += ["--n_threads", threads, "--n_threads_batch", threads]
        common += ["--hf_pretrained_model_name_or_path", weights.path]
        flags = {
            PLAIN: ["--logits_all", "false"],
            LOOKUP: ["--logits_all", "true", "--draft_model", "prompt-lookup-decoding"],
        }
        self._servers = {
            method: stack.enter_context(
                start("llama_cpp.server", ["bench.peers.llama_server", *common, *flags[method]], "/v1/models", {})
            )
            for method in self.methods
        }

    def answer(self, method: str, question: Question) -> Answer:
        fields = {"prompt": question.prompt, "max_tokens": question.max_tokens, "seed": question.seed}
        fields |= {"temperature": question.temperature, **SAMPLING}
        with self._servers[method].running() as client:
            return complete(client, fields, counts_end=False)
