"""Values of a parameter of which only some run in `make test` and `make kernels`."""

from collections.abc import Iterable
from typing import Any

import pytest


def mostly_slow(values: Iterable[Any], *fast: Any) -> list[Any]:
    """All values, of which only the `fast` ones are not marked as slow; tuples are those of several parameters."""
    found = [*values]
    assert all(each in found for each in fast)
    return [
        each if each in fast else pytest.param(*(each if isinstance(each, tuple) else (each,)), marks=pytest.mark.slow)
        for each in found
    ]
