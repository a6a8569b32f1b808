"""The memory of this machine and its container that is not in use, and that of this process.

Imports no torch, so that the front end may ask, too.
"""

import contextlib
import os
from pathlib import Path


def free_bytes() -> int:
    """The memory that this process may still take, in bytes."""
    return min([system_bytes(), *(max(0, limit - used) for limit, used in container_limits())])


def own_bytes() -> int | None:
    """The memory of this process that is no file's, in bytes; None where the system does not tell."""
    with contextlib.suppress(OSError, KeyError):
        fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return int(fields["RssAnon"].split()[0]) << 10  # kB
    return None


def system_bytes(root: Path = Path("/")) -> int:
    """The machine's free memory, in bytes. The page cache is free: it is full of the weights' files."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        fields = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) << 10  # kB
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def container_limits(root: Path = Path("/")) -> list[tuple[int, int]]:
    """The limit and the use, in bytes, of each control group (version 1 or 2) that this process belongs to.

    A container may see its own group as the root of the file system, or at the path that its host sees.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        controllers, path = line.split(":", 2)[1:]
        if controllers not in ("", "memory"):
            continue
        mount = root / "sys/fs/cgroup" / controllers
        names = ("memory.max", "memory.current") if not controllers else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        group = Path(path.lstrip("/"))
        for each in (group, *group.parents):
            with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
                limit, used = (int((mount / each / name).read_text()) for name in names)
                found.append((limit, used - reclaimable_bytes(mount / each)))
    return found


def reclaimable_bytes(group: Path) -> int:
    """The page cache of a control group that the system takes back when memory is needed."""
    fields = [line.split() for line in (group / "memory.stat").read_text().splitlines()]
    found = {name: int(value) for name, value in fields}
    return found.get("total_inactive_file", found.get("inactive_file", 0))
