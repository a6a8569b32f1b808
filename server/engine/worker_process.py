"""The operating-system process of a worker: starts it, waits for it and kills it."""

from __future__ import annotations

import contextlib
import subprocess
import time
from typing import Any, ClassVar

from outrider.server.engine import messages, program
from outrider.server.engine.messages import Start
from outrider.server.engine.transport import framed
from outrider.server.settings import Settings


class WorkerProcess:
    """A running worker and the front end's end of the socket to it."""

    module: ClassVar[str] = "outrider.server.worker.main"  # the process runs this module's `main`

    def __init__(self, settings: Settings) -> None:
        """Starts the process; returns at once. The settings cross the socket without the API keys. Raises OSError."""
        started_at = time.monotonic()
        self._process, self.socket = program.start(self.module)
        with contextlib.suppress(ConnectionError):  # the closed socket reports a worker that has already ended
            self.socket.sendall(framed(messages.encode(Start(encode_settings(settings), started_at))))

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process is running."""
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


def encode_settings(settings: Settings) -> dict[str, Any]:
    """The settings as plain data, with the API keys masked."""
    return settings.model_dump(mode="json")


def decode_settings(plain: dict[str, Any]) -> Settings:
    """The settings that `encode_settings` wrote. Reads neither files nor the environment."""
    sections = {name: field.annotation for name, field in Settings.model_fields.items()}
    return Settings.model_construct(**{name: section.model_validate(plain[name]) for name, section in sections.items()})  # type: ignore[union-attr]
