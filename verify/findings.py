"""Measurements that are saved for the next start."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def save_finding(found: dict[str, Any], file: Path | None) -> None:
    """Saves figures as JSON, if there is a file; a file that cannot be written is left out."""
    if file is None:
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(f".{os.getpid()}.partial")
        partial.write_text(json.dumps(found))
        partial.replace(file)
    except OSError:
        pass  # the next start measures again
