"""What the server says of itself, on stderr: lines for people, or a JSON object each.

Promises that what clients send is in no line, unless the owner has asked for it.
"""

from __future__ import annotations

import json
import logging
from typing import Any

from server.settings import Logging


class JsonFormatter(logging.Formatter):
    """A line is a JSON object; what `extra` gave as `fields` stands beside the message."""

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
    """The same for people: time, level, message, and the fields behind it."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        fields = " ".join(f"{name}={value}" for name, value in getattr(record, "fields", {}).items())
        return f"{super().formatMessage(record)} {fields}".rstrip()


def configure(settings: Logging) -> None:
    """Sets this process's logging up."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if settings.format == "json" else HumanFormatter())
    logging.basicConfig(level=settings.level.upper(), handlers=[handler], force=True)
    for noisy in ("httpx", "httpcore", "urllib3", "filelock"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
