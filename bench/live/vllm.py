"""vLLM's server on a CPU: plain, with its n-gram and suffix speculation, and with Outrider's drafts.

Its environment needs Outrider's drafters: `pip install --no-deps ./drafters`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from bench.http.process import start
from bench.live.chat import ask, fields_of
from bench.live.setup import LivePeer, Question, Setup
from bench.live.turns import Answer

NAME, PLAIN = "vllm", "plain"
SPECULATION: Mapping[str, Mapping[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 2, "prompt_lookup_max": 4},
    "suffix": {"method": "suffix"},
    "outrider": {"method": "custom_class", "model": "outrider.engines.vllm.Proposer", "num_speculative_tokens": 8},
}
# The size of the cache of keys and values. One answer at a time needs less.
CACHE_GIB = "1"


class VllmChat(LivePeer):
    """`vllm.entrypoints.openai.api_server`; a process for each method."""

    name, transport = NAME, "HTTP"
    methods: Sequence[str] = (PLAIN, *SPECULATION)

    def __init__(self, setup: Setup, stack: ExitStack) -> None:
        common = ["vllm.entrypoints.openai.api_server", "--model", setup.model_folder, "--served-model-name", NAME]
        common += ["--dtype", setup.dtype, "--max-model-len", str(setup.context_tokens), "--max-num-seqs", "1"]
        common += ["--no-enable-prefix-caching", "--generation-config", "vllm"]
        cores = f"0-{setup.threads - 1}"
        environment = {"VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_CPU_KVCACHE_SPACE": CACHE_GIB, "HF_HUB_OFFLINE": "1"}
        flags = {method: ["--speculative-config", json.dumps(config)] for method, config in SPECULATION.items()}
        self._servers = {
            method: stack.enter_context(
                start([*common, *flags.get(method, ())], "/health", True, setup.choice.vllm, **environment)
            )
            for method in self.methods
        }

    def answer(self, method: str, item: Question) -> Answer:
        with self._servers[method].running() as client:
            return ask(client, fields_of(item) | {"model": NAME})
