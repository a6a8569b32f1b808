"""The base class of all sections of the settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


class Section(BaseModel):
    """A group of settings."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _take_texts_as_lists(cls, values: Any) -> Any:
        """One text stands for a list of it."""
        if not isinstance(values, Mapping):
            return values
        lists = {name for name, field in cls.model_fields.items() if "tuple[" in str(field.annotation)}
        return {name: (value,) if name in lists and isinstance(value, str) else value for name, value in values.items()}


class SettingsError(ValueError):
    """A setting is invalid. The message is one sentence that names the setting and the values it accepts."""


def parse_list(name: str, value: str) -> Any:
    """Decodes a JSON list. Raises SettingsError."""
    try:
        return json.loads(value)
    except ValueError:
        raise SettingsError(f'{name} takes a JSON list such as \'["a", "b"]\', not {value}.') from None
