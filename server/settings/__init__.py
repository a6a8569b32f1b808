"""The settings: the tree, its sources, and its reference."""

from outrider.server.settings.access import ApiKey, Auth, MetricsAccess, Server
from outrider.server.settings.models import DraftModel, Model
from outrider.server.settings.section import SettingsError
from outrider.server.settings.sources import load_settings, parse_flags
from outrider.server.settings.tree import Corpora, Limits, Logging, Scheduling, Sessions, Settings, Speculation, Tracing

__all__ = [
    "ApiKey",
    "Auth",
    "Corpora",
    "DraftModel",
    "Limits",
    "Logging",
    "MetricsAccess",
    "Model",
    "Scheduling",
    "Server",
    "Sessions",
    "Settings",
    "SettingsError",
    "Speculation",
    "Tracing",
    "load_settings",
    "parse_flags",
]
