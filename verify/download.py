"""The progress of a download from the hub as one line: rewritten in place on a terminal, otherwise repeated in the log.

The hub's own bars are disabled, because they take several lines on a terminal and thousands in a log.
"""

import logging
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TextIO

from tqdm import tqdm

log = logging.getLogger("outrider.worker")
# Shorter downloads show nothing.
QUIET_SECONDS = 1.0
# The time between updates in a terminal.
TERMINAL_SECONDS = 0.2
LOG_SECONDS = 10.0


class DownloadLine:
    """Writes how much of a model has been downloaded. Thread-safe."""

    def __init__(self, name: str, output: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """Writes to `output`, or to stderr."""
        self._name = name
        self._output = output or sys.stderr
        self._terminal = self._output.isatty()
        self._clock = clock
        self._lock = threading.Lock()
        self._due = clock() + QUIET_SECONDS
        self._done, self._total = 0, 0  # bytes
        self._shown = False

    def record(self, done: int, total: int) -> None:
        """Records the bytes of a bar. The hub may count a download twice, by network and by disk: the larger count is shown."""
        with self._lock:
            self._done, self._total = max(self._done, done), max(self._total, total)
            finished = self._shown and self._done >= self._total
            if finished or self._clock() >= self._due:
                self._show(finished)

    def _show(self, finished: bool) -> None:
        share = 100 * self._done // max(1, self._total)
        text = f"downloading {self._name}: {self._done / 1e9:.2f} of {self._total / 1e9:.2f} GB ({share} %)"
        if self._terminal:
            self._output.write(f"\r{text}\x1b[K" + "\n" * finished)
            self._output.flush()
        else:
            log.info(text)
        self._shown = not finished
        self._due = self._clock() + (TERMINAL_SECONDS if self._terminal else LOG_SECONDS)


class NoBar(tqdm):  # type: ignore[misc]  # tqdm carries no types
    """A bar of the hub that draws nothing."""

    def __init__(self, *arguments: Any, **fields: Any) -> None:
        super().__init__(*arguments, **{**fields, "disable": True})
        self._counts_bytes = fields.get("unit") == "B"  # else files


class DownloadBar(NoBar):
    """Passes its bytes on to a DownloadLine."""

    line: DownloadLine

    def update(self, n: float | None = 1) -> None:
        self.n += n or 0
        if self._counts_bytes:
            self.line.record(int(self.n), int(self.total or 0))


def download_progress(name: str) -> type[DownloadBar]:
    """The class of bars for the download of the model `name`, as `tqdm_class` of transformers and the hub."""
    return type("ModelDownloadBar", (DownloadBar,), {"line": DownloadLine(name)})
