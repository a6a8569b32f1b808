"""Drafters' learned state, as arrays by name: saved with a session, and loaded into a new drafter.

Each class that learns says what its state is: `state` returns the arrays, `load` restores them in a new object. A class with
parts that learn joins their states under their names. Buffers, tables that sessions share, and draft models are no state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from outrider.drafters.sequence import Sequence

if TYPE_CHECKING:
    from outrider.drafters.interface import Verdict

State = Mapping[str, NDArray[Any]]


class StateError(ValueError):
    """Saved arrays do not fit the drafter."""


class Stateless:
    """A drafter that learns nothing beyond a request, and by default nothing at all."""

    feedback = 0
    prunable = True

    def observe(self, verdict: Verdict) -> None:
        pass

    def end(self) -> None:
        pass

    def state(self) -> State:
        return {}

    def load(self, saved: State, text: Sequence) -> None:
        pass


def join(**parts: State) -> dict[str, NDArray[Any]]:
    """One state of several, with the names of the parts before theirs."""
    return {f"{name}.{key}": array for name, state in parts.items() for key, array in state.items()}


def part(saved: State, name: str) -> State:
    """The state that was joined under `name`."""
    return {key.removeprefix(f"{name}."): array for key, array in saved.items() if key.startswith(f"{name}.")}


def numbers(*values: float) -> NDArray[np.float64]:
    return np.array(values, np.float64)


def array(saved: State, name: str, dtype: type[np.generic], *shape: int | None) -> NDArray[Any]:
    """A saved array of this type and shape; None stands for any length. Raises StateError."""
    found = saved.get(name)
    if found is None:
        raise StateError(f"{name} is missing")
    fits = found.ndim == len(shape) and all(size in (None, actual) for size, actual in zip(shape, found.shape, strict=True))
    if found.dtype != dtype or not fits:
        raise StateError(f"{name} is {found.dtype} {list(found.shape)}")
    return found


def restore(arrays: State, saved: State) -> None:
    """Copies saved arrays into arrays of the same names, types and shapes. Raises StateError."""
    for name, target in arrays.items():
        target[...] = array(saved, name, target.dtype.type, *target.shape)
