"""Passes our keyword arguments to the layers that take them, also in models that do not pass them on."""

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch


class NotPassedOn(ValueError):
    """A layer was called without our keyword arguments."""

    def __init__(self, kind: str) -> None:
        super().__init__(f"This model does not pass keyword arguments to its {kind} layers, so it cannot be served.")


class KwargInjector:
    """Adds the same keyword arguments to the calls of some layers: by the model's own call, or by hooks."""

    def __init__(
        self, layers: Iterable[torch.nn.Module] | None = None, bring: Callable[[Any, torch.device], Any] | None = None
    ) -> None:
        """The layers that need hooks; None if the model passes on what it is called with.

        `bring` gives what is delivered on a layer's device; without it, the layers are on one device.
        """
        self._arguments: dict[str, Any] = {}  # for the layers that have hooks, during a forward
        self._bring = bring
        self._has_hooks = layers is not None
        for layer in layers or ():
            layer.register_forward_pre_hook(self._add, with_kwargs=True)

    def _add(self, _: torch.nn.Module, inputs: Any, others: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        arguments = self._arguments
        if self._bring is not None:
            # That of the call's first tensor: a layer whose weights are packed has no parameters that would tell it.
            first = next(each for each in (*inputs, *others.values()) if isinstance(each, torch.Tensor))
            arguments = self._bring(arguments, first.device)
        return inputs, others | arguments

    @contextmanager
    def inject(self, arguments: dict[str, Any], positions: torch.Tensor | None = None) -> Iterator[dict[str, Any]]:
        """Adds these arguments inside the context, in one forward at a time; yields those for the model's own call.

        Hooks also add `positions`, [N], since these models may not tell them to their layers.
        """
        if not self._has_hooks:
            yield arguments
            return
        self._arguments = arguments | {"positions": positions}
        try:
            yield {}
        finally:
            self._arguments = {}


def own_forward(module: torch.nn.Module) -> FunctionType | None:
    """The forward of the module's class, without decorators; None if it is not a Python function."""
    forward = inspect.unwrap(type(module).forward)
    return forward if isinstance(forward, FunctionType) else None


def is_receiver(module: torch.nn.Module) -> bool:
    """Whether a module takes our keyword arguments: as a recurrent layer, or for transformers' attention interface."""
    forward = own_forward(module)
    calls_interface = forward is not None and "ALL_ATTENTION_FUNCTIONS" in forward.__code__.co_names
    return hasattr(module, "recurrent_layer") or calls_interface
