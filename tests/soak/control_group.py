"""A control group of Linux (version 1 or 2) that limits the memory of processes. Needs root."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
# The time until a group whose processes have ended is empty.
REMOVE_SECONDS = 10.0


@contextmanager
def memory_group(limit_bytes: int) -> Iterator[Path | None]:
    """A new group with this limit, which `joined` enters; None if none can be made. Removed at the end."""
    controllers = ROOT / "cgroup.controllers"
    is_version_2 = controllers.exists() and "memory" in controllers.read_text().split()
    group = ROOT / ("" if is_version_2 else "memory") / f"outrider-{os.getpid()}-{time.monotonic_ns()}"
    try:
        group.mkdir()
        (group / ("memory.max" if is_version_2 else "memory.limit_in_bytes")).write_text(str(limit_bytes))
    except OSError:
        with contextlib.suppress(OSError):
            group.rmdir()
        yield None
        return
    try:
        yield group
    finally:
        deadline = time.monotonic() + REMOVE_SECONDS
        while group.exists() and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.1)


@contextmanager
def joined(group: Path | None) -> Iterator[None]:
    """Processes that are started in this block belong to the group; this process returns to where it was."""
    if group is None:
        yield
        return
    before = own_group(group)
    (group / "cgroup.procs").write_text(str(os.getpid()))
    try:
        yield
    finally:
        (before / "cgroup.procs").write_text(str(os.getpid()))


def own_group(group: Path) -> Path:
    """This process's group in the hierarchy of another one."""
    controller = "memory" if group.parent.name == "memory" else ""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(",") and (ROOT / controller / path.lstrip("/")).is_dir():
            return ROOT / controller / path.lstrip("/")
    return ROOT / controller
