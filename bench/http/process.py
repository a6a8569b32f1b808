"""A server process: starts one, finds its worker, reads its memory."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from bench.plan import BenchError

START_SECONDS = 300
STOP_SECONDS = 60
LOG_LINES = 10_000


@dataclass(frozen=True)
class ServerProcess:
    """A running server that this process started."""

    url: str
    process: subprocess.Popen[str]
    log: deque[str]  # last lines of its stderr


@contextmanager
def start_server(flags: Sequence[str], program: str = "outrider.server.cli") -> Iterator[ServerProcess]:
    """Starts a server on a free port, waits until it is ready, and stops it at the end. Raises BenchError.

    `program` is the module of its command line.
    """
    command = [sys.executable, "-m", program, "serve", "--port", "0", *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    log: deque[str] = deque(maxlen=LOG_LINES)
    reader = threading.Thread(target=log.extend, args=(process.stderr,), daemon=True)  # a full pipe would block the server
    try:
        url = served_url(process.stderr)
        reader.start()
        wait_until_ready(url, process)
        yield ServerProcess(url, process, log)
    finally:
        process.terminate()
        process.wait(STOP_SECONDS)
        if reader.ident is not None:
            reader.join(STOP_SECONDS)
        process.stderr.close()


def served_url(lines: Iterable[str]) -> str:
    """The address that a server prints at its start, after any lines of its log. Raises BenchError if the lines end before."""
    line = ""
    for line in lines:
        if match := re.search(r"serving .* at (http://\S+)/v1", line):
            return match[1]
    raise BenchError(f"The server did not start: {line.strip()}")


def wait_until_ready(url: str, process: subprocess.Popen[str]) -> None:
    """Polls /ready. Raises BenchError if the process ends, or after START_SECONDS."""
    deadline = time.monotonic() + START_SECONDS
    while httpx.get(f"{url}/ready").status_code != 200:
        if process.poll() is not None:
            raise BenchError("The server ended before it was ready.")
        if time.monotonic() > deadline:
            raise BenchError(f"The server was not ready within {START_SECONDS} s.")
        time.sleep(0.2)


def find_worker(process_id: int) -> int | None:
    """Process id of a server's worker, found by its command line; None while there is none."""
    for child in children(process_id):
        try:
            if b"outrider.server.worker.main" in Path(f"/proc/{child}/cmdline").read_bytes():
                return child
        except OSError:
            continue
    return None


def children(process_id: int) -> list[int]:
    """Process ids of a process's children."""
    tasks = Path(f"/proc/{process_id}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def resident_mb(process_id: int) -> float:
    """Anonymous resident memory of a process in MiB (pages of mapped files excluded); 0 if it has ended."""
    try:
        status = Path(f"/proc/{process_id}/status").read_text()
    except OSError:
        return 0.0
    match = re.search(r"RssAnon:\s+(\d+) kB", status)
    return int(match[1]) / 1024 if match else 0.0
