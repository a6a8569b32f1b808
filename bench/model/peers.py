"""Peers to compare with: transformers' `generate`, plain, with prompt lookup, and with an assistant model."""

from __future__ import annotations

import time
from typing import Any, Literal, get_args

import torch
from transformers import AutoModelForCausalLM

from outrider import models
from outrider.drafters.interface import Ints
from outrider.verify.model.loading import stop_ids
from outrider.verify.tokenizer import load_tokenizer

PeerName = Literal["transformers", "transformers-lookup", "transformers-assistant"]
PEERS: tuple[PeerName, ...] = get_args(PeerName)
LOOKUP_TOKENS = 10  # as in transformers' documentation


class Transformers:
    """`generate` over the same weights, with transformers' own cache and attention."""

    def __init__(self, path: str, dtype: torch.dtype, device: torch.device, draft: str | None) -> None:
        """`draft` is the assistant's path; the default is the embedded draft model if the target is the embedded one."""
        if draft is None and path == str(models.TARGET):
            draft = str(models.DRAFT)
        self._device, self._dtype = device, dtype
        self._model = self._load(path)
        self._assistant = self._load(draft) if draft else None
        self._stop_ids = sorted(stop_ids(self._model, load_tokenizer(path)))

    def _load(self, path: str) -> Any:
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=self._dtype, use_safetensors=True)
        return model.to(self._device).eval()

    @property
    def names(self) -> list[PeerName]:
        """The peers that can run: the assistant needs a draft model."""
        return [name for name in PEERS if self._assistant is not None or name != "transformers-assistant"]

    @torch.inference_mode()
    def answer(
        self, name: PeerName, prompt: Ints, temperature: float, max_tokens: int, seed: int, streamer: Any = None
    ) -> tuple[list[int], float]:
        """The answer's token ids and its seconds, prefill included. `streamer` is one of transformers' streamers."""
        options: dict[str, Any] = {
            "use_cache": True,
            "streamer": streamer,
            "max_new_tokens": max_tokens,
            "do_sample": temperature > 0,
            "top_k": 0,
            "top_p": 1.0,
        }
        if temperature > 0:
            options["temperature"] = temperature
            torch.manual_seed(seed)
        if name == "transformers-lookup":
            options["prompt_lookup_num_tokens"] = LOOKUP_TOKENS
        if name == "transformers-assistant":
            options["assistant_model"] = self._assistant
        if self._stop_ids:
            options |= {"eos_token_id": self._stop_ids, "pad_token_id": self._stop_ids[0]}
        ids = torch.from_numpy(prompt).long()[None].to(self._device)
        started = time.perf_counter()
        output = self._model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        tokens: list[int] = output[0, ids.shape[1] :].tolist()
        return tokens, time.perf_counter() - started
