"""Other values of constants, for all tests of a module."""

from collections.abc import Iterator
from typing import Any

import pytest


def patched(module: Any, **values: Any) -> Any:
    """A fixture of the test module that has it: its tests see these values in `module`."""

    @pytest.fixture(scope="module", autouse=True)
    def constants() -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in values.items():
                patch.setattr(module, name, value)
            yield

    return constants
