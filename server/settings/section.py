"""The base class of all sections of the settings."""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A group of settings."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class SettingsError(ValueError):
    """A setting is invalid. The message is one sentence that names the setting and the values it accepts."""


def parse_list(name: str, value: str) -> Any:
    """Decodes a JSON list. Raises SettingsError."""
    try:
        return json.loads(value)
    except ValueError:
        raise SettingsError(f'{name} takes a JSON list such as \'["a", "b"]\', not {value}.') from None
