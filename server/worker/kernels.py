"""The drafters' compiled kernels. Compiling them takes half a minute, loading them from numba's cache a fraction of a second.

At the first start on a machine, background processes compile them into the cache while the worker already serves: those of the
default drafter first, then the others. Until then, `outrider.drafters.prompt_lookup` drafts, which needs none. Drafts never
change an answer, so only the speed differs.
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

from outrider.drafters.kernel import NotCached, without_compiling
from outrider.drafters.options import NAMES, DrafterName
from outrider.drafters.registry import Resources, warm
from outrider.server.engine.program import command
from outrider.server.engine.worker_process import decode_settings, encode_settings
from outrider.server.settings import Settings
from outrider.server.worker.resources import Tables, distinct, load_resources

log = logging.getLogger("outrider.worker")
# Requests run first.
NICENESS = 5


class Kernels:
    """Loads the drafters' kernels; `covers` tells which drafters can run. Owns the process that compiles them."""

    def __init__(self, settings: Settings, background: bool = True) -> None:
        """Without `background`, `load` blocks until the missing kernels are compiled."""
        self.ready = False  # whether the kernels of all drafters are loaded
        default = settings.speculation.drafter
        # Drafters whose kernels are not loaded yet; each group is compiled by a process of its own.
        self._groups: list[tuple[DrafterName, ...]] = [(default,), tuple(name for name in NAMES if name != default)]
        self._covered: set[DrafterName] = {"none"}
        self._settings = settings
        self._background = background
        self._tables: Tables | None = None  # None before `load`, and once there is nothing left to do
        self._process: subprocess.Popen[str] | None = None
        self._started_at = 0.0  # time.monotonic() of the process's start
        self._resources: Sequence[Resources] = ()

    def covers(self, name: DrafterName) -> bool:
        """Whether this drafter's kernels are loaded."""
        return self.ready or name in self._covered

    def load(self, resources: Sequence[Resources], tables: Tables) -> None:
        """Sets the resources that the kernels are for. Without `background`, loads or compiles the kernels at once.

        `tables` opens the same tables in the background process.
        """
        self._resources = resources
        if self._background:
            self._tables = tables
        else:
            self._warm(NAMES)
            self.ready = True

    def poll(self) -> None:
        """Loads the kernels: the first call those that are cached, later ones those that were compiled. Call it per step."""
        if self._tables is None or (self._process is not None and self._process.poll() is None):
            return
        process, self._process = self._process, None
        if process is not None:
            process.communicate()  # waits, and closes the pipe
        while self._groups and self._try_cache(self._groups[0]):
            self._covered.update(self._groups.pop(0))
            if process is not None:
                log.info("the kernels are compiled after %.1f s", time.monotonic() - self._started_at)
                process = None
        if self._groups and process is None:
            self._start_compiling(self._tables, self._groups[0])
            return
        self._tables, self.ready = None, not self._groups
        if process is not None:
            log.error(
                "the drafters' kernels could not be cached (exit code %d), so drafts come from the text's own "
                "repetitions only; set NUMBA_CACHE_DIR to a writable folder and restart the server",
                process.returncode,
            )

    def _start_compiling(self, tables: Tables, names: Sequence[DrafterName]) -> None:
        log.info("compiling kernels for this machine (%s); until then, drafts come from the text's own repetitions", names[0])
        self._started_at = time.monotonic()
        work = json.dumps({"fingerprint": tables.fingerprint, "vocabulary": tables.vocabulary, "names": names})
        self._process = subprocess.Popen(command(__name__, work), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(encode_settings(self._settings)) + "\n")
        self._process.stdin.flush()

    def close(self) -> None:
        """Ends the background process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()  # waits, and closes the pipe

    def _try_cache(self, names: Sequence[DrafterName]) -> bool:
        try:
            with without_compiling():
                self._warm(names)
        except NotCached:
            return False
        return True

    def _warm(self, names: Sequence[DrafterName]) -> None:
        for each in self._resources:
            warm(each, names)


def main(work: str) -> None:
    """The background process: compiles some drafters' kernels for the settings on stdin. Ends when stdin closes."""
    os.nice(NICENESS)
    settings = decode_settings(json.loads(sys.stdin.readline()))
    threading.Thread(target=end_with_worker, daemon=True).start()
    chosen = json.loads(work)
    shared, own = load_resources(settings, Tables(lambda: chosen["fingerprint"], chosen["vocabulary"]))
    for each in distinct([shared, *own.values()]):
        warm(each, chosen["names"])


def end_with_worker() -> None:
    """Ends this process when the worker does."""
    sys.stdin.read()
    os._exit(1)
