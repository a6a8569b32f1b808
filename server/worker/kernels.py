"""The drafters' compiled kernels. Compiling them takes half a minute, loading them from numba's cache a fraction of a second.

At the first start on a machine, a background process compiles them into the cache while the worker already serves: until it is
done, answers are decoded without drafts. Drafts never change an answer, so only the speed differs.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict

from numba.core.event import Event, Listener, install_listener

from drafters.registry import Resources, warm
from server.engine.worker_process import command, decode_settings, encode_settings
from server.settings import Settings
from server.worker.resources import Tables, distinct, load_resources

log = logging.getLogger("outrider.worker")
NICENESS = 5  # requests run first


class NotCached(Exception):
    """A kernel is not in numba's cache."""


class CompileRefusal(Listener):  # type: ignore[misc]
    """While installed, a kernel that would have to be compiled raises NotCached instead."""

    def on_start(self, event: Event) -> None:
        raise NotCached

    def on_end(self, event: Event) -> None:
        """Required by numba; nothing to do."""


class Kernels:
    """Loads the drafters' kernels; `ready` tells whether they can run. Owns the process that compiles them."""

    def __init__(self, settings: Settings, background: bool = True) -> None:
        """Without `background`, `load` blocks until the missing kernels are compiled."""
        self.ready = False
        self._settings = settings
        self._background = background
        self._tables: Tables | None = None  # of kernels that have not been looked for yet
        self._process: subprocess.Popen[str] | None = None
        self._started_at = 0.0  # time.monotonic() of the process's start
        self._resources: Sequence[Resources] = ()

    def load(self, resources: Sequence[Resources], tables: Tables) -> None:
        """Sets the resources that the kernels are for. Without `background`, loads or compiles the kernels at once.

        `tables` opens the same tables in the background process.
        """
        self._resources = resources
        if self._background:
            self._tables = tables
        else:
            self._warm()
            self.ready = True

    def poll(self) -> None:
        """Loads the kernels: the first call those that are cached, a later one those that were compiled. Call it per step."""
        if self._tables is not None:
            tables, self._tables = self._tables, None
            self.ready = self._try_cache()
            if not self.ready:
                self._start_compiling(tables)
        elif self._process is not None and self._process.poll() is not None:
            self._load_compiled(self._process)

    def _start_compiling(self, tables: Tables) -> None:
        log.info("compiling the drafters' kernels for this machine; until then, answers are decoded without drafts")
        self._started_at = time.monotonic()
        self._process = subprocess.Popen(
            command(__name__, json.dumps(asdict(tables))), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
        )
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(encode_settings(self._settings)) + "\n")
        self._process.stdin.flush()

    def _load_compiled(self, process: subprocess.Popen[str]) -> None:
        process.communicate()
        self._process = None
        self.ready = process.returncode == 0 and self._try_cache()
        if self.ready:
            log.info("the drafters' kernels are compiled after %.1f s", time.monotonic() - self._started_at)
        else:
            log.error(
                "the drafters' kernels could not be cached (exit code %d), so answers are decoded without drafts; "
                "set NUMBA_CACHE_DIR to a writable folder and restart the server",
                process.returncode,
            )

    def close(self) -> None:
        """Ends the background process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()  # waits, and closes the pipe

    def _try_cache(self) -> bool:
        try:
            with install_listener("numba:compile", CompileRefusal()):
                self._warm()
        except NotCached:
            return False
        return True

    def _warm(self) -> None:
        for each in self._resources:
            warm(each)


def main(tables: str) -> None:
    """The background process: compiles every kernel for the settings on stdin. Ends when stdin closes."""
    os.nice(NICENESS)
    settings = decode_settings(json.loads(sys.stdin.readline()))
    threading.Thread(target=end_with_worker, daemon=True).start()
    shared, own = load_resources(settings, Tables(**json.loads(tables)))
    for each in distinct([shared, *own.values()]):
        warm(each)


def end_with_worker() -> None:
    """Ends this process when the worker does."""
    sys.stdin.read()
    os._exit(1)
