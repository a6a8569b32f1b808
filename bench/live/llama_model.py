"""llama-cpp-python's model, which counts its forwards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from llama_cpp import Llama, llama_cpp
from llama_cpp.llama_speculative import LlamaDraftModel
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding as LlamaPromptLookupDecoding

from outrider.verify.model.cpu.native.variants import processor_flags


@cache
def avoid_amx() -> None:
    """Switches off the kernels of llama.cpp that crash on CPUs with AMX; on others, they stay."""
    if "amx_tile" in processor_flags():
        defaults = llama_cpp.llama_model_default_params

        def without_extra_buffers() -> Any:
            parameters = defaults()
            parameters.use_extra_bufts = False
            return parameters

        llama_cpp.llama_model_default_params = without_extra_buffers


class Model(Llama):  # type: ignore[misc]
    """A model of a GGUF file."""

    evaluations = 0  # forwards since `begin`, the prompt's included

    @classmethod
    @contextmanager
    def opened(cls, file: Path, context_tokens: int, threads: int, draft_model: LlamaDraftModel | None) -> Iterator[Model]:
        """Loads a file and frees it at the end. With drafts, every row of a forward has logits."""
        avoid_amx()
        model = cls(
            str(file),
            n_ctx=context_tokens,
            n_threads=threads,
            n_threads_batch=threads,
            logits_all=draft_model is not None,  # without it, drafts fail beyond the first batch
            draft_model=draft_model,
            verbose=False,
        )
        try:
            yield model
        finally:
            model.close()

    def begin(self) -> None:
        """Empties the cache."""
        self.reset()
        self.evaluations = 0

    def eval(self, tokens: Sequence[int]) -> None:
        self.evaluations += 1
        super().eval(tokens)
