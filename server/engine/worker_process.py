"""The operating-system process of a worker.

Imports little, so that the process starts, and imports its own modules, while the front end reads the settings.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, ClassVar

from outrider.server.engine.program import Program

if TYPE_CHECKING:
    from outrider.server.settings import Settings


class WorkerProcess(Program):
    module: ClassVar[str] = "outrider.server.worker.main"  # the process runs this module's `main`

    def __init__(self, settings: Settings | None = None) -> None:
        """Starts the process, which waits for `begin` unless `settings` are given; returns at once. Raises OSError."""
        self._started_at = time.monotonic()
        super().__init__(self.module)
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
