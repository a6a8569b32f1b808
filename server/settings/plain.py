"""The settings as plain data, which crosses to other processes without the API keys."""

from __future__ import annotations

from typing import Any

from outrider.server.settings.tree import Settings


def encode_settings(settings: Settings) -> dict[str, Any]:
    """The settings as plain data, with the API keys masked."""
    return settings.model_dump(mode="json")


def decode_settings(plain: dict[str, Any]) -> Settings:
    """The settings that `encode_settings` wrote. Reads neither files nor the environment."""
    sections = {name: field.annotation for name, field in Settings.model_fields.items()}
    return Settings.model_construct(**{name: section.model_validate(plain[name]) for name, section in sections.items()})  # type: ignore[union-attr]
