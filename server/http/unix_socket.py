"""A UNIX socket to listen on: its file belongs to the running server, and to no other one."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

# A server that runs accepts a connection within this time.
CHECK_SECONDS = 1.0


@contextlib.contextmanager
def listening_at(path: Path, mode: int) -> Iterator[socket.socket]:
    """A listening socket whose file has `mode`, and is removed at the end. Raises OSError with one sentence.

    Replaces the file of a server that has not ended properly.
    """
    if not hasattr(socket, "AF_UNIX"):
        raise OSError("This system's Python has no UNIX sockets; leave out server.socket.")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            _remove_stale(path)
            listener.bind(str(path))
            own = os.stat(path).st_ino
            os.chmod(path, mode)  # nobody can connect before the socket listens
            listener.listen(1024)
        except OSError as error:
            reason = error.strerror or str(error)
            raise OSError(f"Cannot listen on the UNIX socket {path} ({reason}); choose another server.socket.") from None
        try:
            yield listener
        finally:
            with contextlib.suppress(OSError):
                if os.stat(path).st_ino == own:  # otherwise, another server's
                    os.unlink(path)


def _remove_stale(path: Path) -> None:
    """Removes a socket on which nobody listens. Raises OSError if there is something else."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise OSError("there is a file that is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(CHECK_SECONDS)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return os.unlink(path)
        except TimeoutError:  # its queue is full
            pass
    raise OSError("a running server listens there")
