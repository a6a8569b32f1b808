"""The operating-system process of a worker: starts it, waits for it and kills it.

Imports little, so that the process starts, and imports its own modules, while the front end reads the settings.
"""

from __future__ import annotations

import contextlib
import subprocess
import time
from typing import TYPE_CHECKING, ClassVar

from outrider.server.engine import program

if TYPE_CHECKING:
    from outrider.server.settings import Settings


class WorkerProcess:
    """A running worker and the front end's end of the socket to it."""

    module: ClassVar[str] = "outrider.server.worker.main"  # the process runs this module's `main`

    def __init__(self, settings: Settings | None = None) -> None:
        """Starts the process, which waits for `begin` unless `settings` are given; returns at once. Raises OSError."""
        self._started_at = time.monotonic()
        self._process, self.socket = program.start(self.module)
        if settings is not None:
            self.begin(settings)

    def begin(self, settings: Settings) -> None:
        """Has the process load the model. The settings cross the socket without the API keys."""
        from outrider.server.engine import messages
        from outrider.server.engine.transport import framed
        from outrider.server.settings.tree import encode_settings

        start = messages.Start(encode_settings(settings), self._started_at)
        with contextlib.suppress(ConnectionError):  # the closed socket reports a worker that has already ended
            self.socket.sendall(framed(messages.encode(start)))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        """The exit code, negative for a signal's number; None while the process runs."""
        return self._process.poll()

    def wait(self, seconds: float) -> None:
        """Waits up to `seconds` for the process to end. Blocks; call it in a thread."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def kill(self) -> None:
        """Ends the process at once, if it still runs."""
        self._process.kill()

    def close(self) -> None:
        """Kills the process, waits for its end and closes the socket."""
        self._process.kill()
        self._process.wait()
        self.socket.close()
