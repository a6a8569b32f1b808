"""Measurements that are saved for the next start."""

import hashlib
import json
import os
import platform
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


def digest(parts: list[str]) -> str:
    """A hash of what a finding depends on, 16 hexadecimal digits."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def processor() -> str:
    """The processor's model name and number of cores. No host name: every container has another one."""
    return f"{processor_name()} {os.cpu_count()}"


def processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
