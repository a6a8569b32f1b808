"""A runtime over the tiny model, with a tokenizer of letters."""

from __future__ import annotations

from typing import Any, cast

from outrider.drafters.registry import Resources
from outrider.server.settings import Settings
from outrider.server.worker.kernels import Kernels
from outrider.server.worker.runtime import Runtime
from outrider.verify.model.runner import ModelRunner


class Letters:
    """Token n is the letter number n modulo 26."""

    special_ids = frozenset[int]()
    drops_first_space = False

    def bytes_of(self, token: int) -> bytes:
        return bytes([ord("a") + token % 26])

    def text_of(self, tokens: list[int]) -> str:
        return b"".join(map(self.bytes_of, tokens)).decode()


def tiny_runtime(runner: ModelRunner, settings: Settings, stop_ids: frozenset[int] = frozenset()) -> Runtime:
    """A runtime as `load` returns it, with kernels compiled at first use."""
    kernels = Kernels(settings, background=False)
    kernels.ready = True
    return Runtime(
        runner=runner,
        tokenizer=cast(Any, None),
        tokens=cast(Any, Letters()),
        stop_ids=stop_ids,
        resources=Resources(),
        own_resources={},
        max_active=2,
        slots=2,
        grammars=cast(Any, None),
        curve=None,
        kernels=kernels,
    )
