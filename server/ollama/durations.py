"""How long a model stays in memory after a request, as Ollama's `keep_alive` says it."""

from __future__ import annotations

import math
import re
from typing import Any

UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "": 1.0}
DURATION = re.compile(r"(-?)((?:\d{1,15}(?:\.\d{1,9})?(?:ns|us|µs|ms|s|m|h|$)){1,7})")
PART = re.compile(r"([\d.]+)([^\d.]*)")
CENTURY_SECONDS = 36525 * 86400.0


def seconds_of(keep_alive: Any) -> float | None:
    """The seconds; inf for a century or a negative time, which mean forever, and None for null. Raises ValueError."""
    if keep_alive is None:
        return None
    if isinstance(keep_alive, int | float) and not isinstance(keep_alive, bool):
        seconds = keep_alive
    elif isinstance(keep_alive, str) and (found := DURATION.fullmatch(keep_alive)):
        seconds = sum(float(number) * UNITS[unit] for number, unit in PART.findall(found[2])) * (-1 if found[1] else 1)
    else:
        raise ValueError("it must be a number of seconds, or a duration such as '5m' or '1h30m'")
    return float(seconds) if 0 <= seconds < CENTURY_SECONDS else math.inf
