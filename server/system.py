"""Features of POSIX and of Linux: locks of files between processes, and limits of a process."""

import errno
import fcntl
import io
import os
import resource
import signal
import stat
import sys
from pathlib import Path
from typing import IO, Any

STDERR = 2  # its descriptor


class TolerantFile(io.FileIO):
    """A file whose loss stops nothing: what cannot be written is dropped."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError:
            return memoryview(data).nbytes


def tolerate_stderr() -> None:
    """Makes lines to stderr that cannot be written, for a full disk or a closed terminal, vanish instead of raising OSError.

    Opens the standard descriptors that are closed, so that no socket gets their numbers.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= STDERR:
        pass
    os.close(descriptor)
    sys.stderr = io.TextIOWrapper(TolerantFile(STDERR, "w", closefd=False), "utf-8", "backslashreplace", write_through=True)


def lock(file: IO[Any], wait: bool = True) -> None:
    """Locks a file until it is closed or its process ends. Raises OSError if it is locked, unless `wait`."""
    fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))


def open_regular(path: str, flags: int) -> int:
    """An opener of files that only their owner can read. Raises OSError for a symbolic link and for anything but a file.

    It does not wait, as opening a pipe would.
    """
    found = os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW, 0o600)
    if not stat.S_ISREG(os.fstat(found).st_mode):
        os.close(found)
        raise OSError(errno.EINVAL, "it is not a regular file", path)
    return found


def allow_open_files(count: int) -> None:
    """Raises this process's limit of open files to `count` if the system allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


def limit_memory(count: int) -> None:
    """Bounds this process's address space to `count` bytes, without core dumps. Raises OSError or ValueError."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (count, count))


def limit_processor_time(seconds: float) -> None:
    """Ends this process once it has computed for so long; 0 removes the limit."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


def stack_limit() -> int | None:
    """The size of the main thread's stack in bytes; None if it is not limited."""
    limit = resource.getrlimit(resource.RLIMIT_STACK)[0]
    return None if limit < 0 else int(limit)


def cpu_seconds(process: int) -> float:
    """The processor time that a process has used; 0 where the system has no files of processes."""
    fields = fields_of(process)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else 0.0


def is_stopped(process: int) -> bool:
    """Whether a process has been stopped by a signal; False where the system has no files of processes."""
    return fields_of(process)[:1] in (["T"], ["t"])


def fields_of(process: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; empty without them."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
