"""Hands our keyword arguments to layers of models that do not pass them on from layer to layer."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class NotHandedOn(ValueError):
    """A layer was called without our keyword arguments."""

    def __init__(self, kind: str) -> None:
        super().__init__(f"This model does not pass keyword arguments to its {kind} layers, so it cannot be served.")


class Delivery:
    """Adds the same keyword arguments to the calls of some layers, by hooks."""

    def __init__(self, layers: Iterable[torch.nn.Module]) -> None:
        self._local = threading.local()
        for layer in layers:
            layer.register_forward_pre_hook(self._add, with_kwargs=True)

    def _add(self, _: torch.nn.Module, inputs: Any, others: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return inputs, others | getattr(self._local, "arguments", {})

    @contextmanager
    def of(self, arguments: dict[str, Any]) -> Iterator[None]:
        """Delivers these arguments inside the context, in the caller's thread."""
        self._local.arguments = arguments
        try:
            yield
        finally:
            self._local.arguments = {}
