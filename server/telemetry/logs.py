"""Logging to stderr, as text lines or as JSON objects.

Promises that no line holds what clients send, unless `logging.prompts` is set.
"""

from __future__ import annotations

import json
import logging
from typing import Any

from server.settings import Logging


class JsonFormatter(logging.Formatter):
    """Formats a record as a JSON object, with the entries of `extra={"fields": ...}` beside the message."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S") + f".{int(record.msecs):03d}",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class HumanFormatter(logging.Formatter):
    """Formats a record as text: time, level, logger, message and fields."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        fields = " ".join(f"{name}={value}" for name, value in getattr(record, "fields", {}).items())
        return f"{super().formatMessage(record)} {fields}".rstrip()


def configure(settings: Logging) -> None:
    """Configures this process's logging."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if settings.format == "json" else HumanFormatter())
    logging.basicConfig(level=settings.level.upper(), handlers=[handler], force=True)
    for noisy in ("httpx", "httpcore", "urllib3", "filelock"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
