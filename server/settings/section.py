"""The base class of all sections of the settings."""

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
        """A text is a JSON list, or stands for a list of it."""
        if not isinstance(values, Mapping):
            return values
        lists = {name for name, field in cls.model_fields.items() if "tuple[" in str(field.annotation)}
        return {name: as_list(value) if name in lists and isinstance(value, str) else value for name, value in values.items()}


class SettingsError(ValueError):
    """A setting is invalid. The message is one sentence that names the setting and the values it accepts."""


def as_list(text: str) -> Any:
    """The list of a setting that is written as text; the text itself if it is no JSON."""
    try:
        return json.loads(text) if text.startswith("[") else (text,)
    except ValueError:
        return text
