"""A runtime over the tiny model, with a tokenizer of letters."""

from __future__ import annotations

from typing import Any, cast

from drafters.registry import Resources
from server.settings import Settings
from server.worker.kernels import Kernels
from server.worker.runtime import Runtime
from verify.model.runner import ModelRunner


class Letters:
    """Token n is the letter number n modulo 26."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(chr(ord("a") + id % 26) for id in token_ids)


def tiny_runtime(runner: ModelRunner, settings: Settings, stop_ids: frozenset[int] = frozenset()) -> Runtime:
    """A runtime as `load` returns it, with kernels compiled at first use."""
    kernels = Kernels(settings, background=False)
    kernels.ready = True
    return Runtime(
        runner=runner,
        tokenizer=cast(Any, Letters()),
        stop_ids=stop_ids,
        resources=Resources(),
        own_resources={},
        max_active=2,
        slots=2,
        grammars=cast(Any, None),
        curve=None,
        kernels=kernels,
    )
