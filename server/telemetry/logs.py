"""Logging to stderr, as text lines or as JSON objects.

Promises that no line holds what clients send, unless `logging.prompts` is set, and that no text can look like another line.
"""

import json
import logging
import re
import textwrap
from types import TracebackType
from typing import Any

from outrider.server.settings import Logging

# Control characters, line separators and marks that reorder text: a terminal or a log reader would act on them.
CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
ExceptionInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


def escape(text: str) -> str:
    r"""Writes control characters as \u and four digits, as in JSON."""
    return CONTROLS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


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
        return escape(json.dumps(line, ensure_ascii=False))


class HumanFormatter(logging.Formatter):
    """Formats a record as text: time, level, logger, message and fields. The lines of a traceback are indented."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        fields = " ".join(f"{name}={value}" for name, value in getattr(record, "fields", {}).items())
        return escape(f"{super().formatMessage(record)} {fields}".rstrip())

    def formatException(self, ei: ExceptionInfo) -> str:
        lines = super().formatException(ei).split("\n")
        return textwrap.indent("\n".join(escape(line) for line in lines), "    ", lambda _: True)


def configure(settings: Logging) -> None:
    """Configures this process's logging."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if settings.format == "json" else HumanFormatter())
    logging.basicConfig(level=settings.level.upper(), handlers=[handler], force=True)
    hub = logging.getLogger("huggingface_hub")  # would print its lines itself, too
    hub.handlers.clear()
    hub.addHandler = lambda hdlr: None  # type: ignore[method-assign]
    for noisy in ("httpx", "httpx2", "httpcore", "httpcore2", "urllib3", "filelock"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
