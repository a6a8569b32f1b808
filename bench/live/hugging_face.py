"""transformers' `generate` in this process: plain, with prompt lookup, and with Outrider's drafts."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer
from transformers.utils.logging import set_verbosity_error

from bench.http.chat import Answer
from bench.live.setup import LivePeer, Question, Setup
from outrider.engines.transformers import generate
from outrider.verify.model.sizes import end_tokens
from outrider.verify.tokenizer import load_tokenizer, stop_ids

# The number of looked up tokens is the one in transformers' documentation.
METHODS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "lookup": {"prompt_lookup_num_tokens": 10},
    "outrider": {"custom_generate": generate},
}


class Arrivals(BaseStreamer):  # type: ignore[misc]
    """Notes when tokens arrive; the first piece is the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Required by transformers; nothing to do."""


class TransformersChat(LivePeer):
    """`generate` over the tokens of the rendered chat, with transformers' own cache and attention."""

    name, methods = "transformers", tuple(METHODS)

    def __init__(self, setup: Setup, stack: ExitStack) -> None:
        set_verbosity_error()  # generate warns at every call
        torch.set_num_threads(setup.threads)
        folder, dtype = setup.model_folder, getattr(torch, setup.dtype)
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, use_safetensors=True).eval()
        self._stop_ids = sorted(stop_ids(end_tokens(self._model), load_tokenizer(folder)))

    @torch.inference_mode()
    def answer(self, method: str, item: Question) -> Answer:
        options: dict[str, Any] = {"max_new_tokens": item.max_tokens, "do_sample": item.temperature > 0, **METHODS[method]}
        if item.temperature > 0:
            options["temperature"] = item.temperature
            torch.manual_seed(item.seed)
        if self._stop_ids:
            options |= {"eos_token_id": self._stop_ids, "pad_token_id": self._stop_ids[0]}
        ids, arrivals = torch.from_numpy(item.ids).long()[None], Arrivals()
        if "custom_generate" in options:
            options |= {"stream_to": arrivals, "seed": item.seed}
        started = time.perf_counter()
        output = self._model.generate(
            ids, attention_mask=torch.ones_like(ids), streamer=arrivals, use_cache=True, top_k=0, top_p=1.0, **options
        )
        tokens: list[int] = output[0, ids.shape[1] :].tolist()
        seconds = time.perf_counter() - started
        _, *times = arrivals.times
        return Answer(len(tokens), seconds, tokens, len(times), times[0] - started)
