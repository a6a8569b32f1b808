"""The settings: the tree, its sources, and its reference."""

from outrider.server.settings.access import ApiKey, Auth, MetricsAccess, Server, is_loopback
from outrider.server.settings.sources import load_settings, parse_flags
from outrider.server.settings.tree import (
    DraftModel,
    Limits,
    Logging,
    Model,
    Responses,
    Scheduling,
    Sessions,
    Settings,
    SettingsError,
    Speculation,
    Tracing,
)

__all__ = [
    "ApiKey",
    "Auth",
    "DraftModel",
    "Limits",
    "Logging",
    "MetricsAccess",
    "Model",
    "Responses",
    "Scheduling",
    "Server",
    "Sessions",
    "Settings",
    "SettingsError",
    "Speculation",
    "Tracing",
    "is_loopback",
    "load_settings",
    "parse_flags",
]
