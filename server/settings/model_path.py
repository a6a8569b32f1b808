"""What names a model in the settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

from outrider.models import smollm2


def locate_model(path: str) -> str:
    """The file of the model that `make serve` installs, for its name; any other path as it is. Raises ValueError."""
    is_short = path.lower().startswith("smol") and smollm2.NAME.lower().startswith(path.lower())
    if is_short and path != smollm2.NAME and not Path(path).exists():
        raise ValueError(f"there is no model {path!r}; did you mean {smollm2.NAME}?")
    try:
        return str(smollm2.locate()) if path == smollm2.NAME else path
    except FileNotFoundError as error:
        raise ValueError(str(error)) from None


ModelPath = Annotated[str, AfterValidator(locate_model)]
