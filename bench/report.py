"""A result with where it comes from: the command, the machine, the commit."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers

RESULTS = Path(__file__).parent / "results"


def provenance() -> dict[str, Any]:
    """What a reader needs to run it again and to compare."""
    return {
        "command": " ".join([Path(sys.argv[0]).name, *(short(argument) for argument in sys.argv[1:])]),
        "machine": machine(),
        "commit": commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def short(argument: str) -> str:
    """A file outside the current folder by its name alone: where it lies is the machine's affair."""
    path = Path(argument)
    return path.name if path.exists() and (path.is_absolute() or ".." in path.parts) else argument


def machine() -> str:
    """The processor (and GPU) in words."""
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()} ({os.cpu_count()} CPU cores)"
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        name = names[0] if names else name
    return f"{name}, {os.cpu_count()} cores"


def commit() -> str:
    """The checkout's commit, marked where files differ from it."""
    root = Path(__file__).parent.parent
    try:
        name = git(root, "rev-parse", "--short=12", "HEAD")
        # Other results may be new; what counts is the code.
        return name + ("-dirty" if git(root, "status", "--porcelain", "--", ".", ":!bench/results") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def git(root: Path, *arguments: str) -> str:
    """What git prints, stripped."""
    return subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True).stdout.strip()


def save(path: Path, figures: Mapping[str, Any]) -> None:
    """Writes the figures and their provenance as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**provenance(), **figures}, indent=1) + "\n")
