"""A process that measures `GET /health`: python -m tests.soak.prober URL

It ends when its stdin closes, and prints the measurements as JSON. It is a process of its own, so that it does not wait for the
attackers' event loop, and uses only the standard library, so that it starts at once.
"""

import contextlib
import http.client
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

INTERVAL_SECONDS = 0.05
TIMEOUT_SECONDS = 30.0


def probe(host: str, port: int) -> tuple[float, bool]:
    """Seconds until the answer on a new connection, and whether it is a 200."""
    started = time.perf_counter()
    connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_SECONDS)
    try:
        connection.request("GET", "/health")
        healthy = connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        healthy = False
    finally:
        connection.close()
    return time.perf_counter() - started, healthy


def with_missed(seconds: float, interval: float = INTERVAL_SECONDS) -> list[float]:
    """The measurement, and those that it kept from being made: a probe per interval would have waited for the rest of it."""
    return [seconds - missed * interval for missed in range(max(1, int(seconds / interval)))]


@contextlib.contextmanager
def probing(url: str) -> Iterator[dict[str, Any]]:
    """Measures `/health` in a process of its own. The measurements are in the dictionary after the block."""
    command = [sys.executable, "-m", "tests.soak.prober", url]
    measured: dict[str, Any] = {}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as prober:
        yield measured
        measured.update(json.loads(prober.communicate()[0]))


def main(url: str) -> None:
    with contextlib.suppress(OSError):
        os.nice(-10)  # the time to schedule this process is not the server's; needs a privilege
    parts = urlsplit(url)
    measured: list[float] = []
    failures = 0
    while not select.select([sys.stdin], [], [], INTERVAL_SECONDS)[0]:
        seconds, healthy = probe(parts.hostname or "", parts.port or 80)
        measured += with_missed(seconds)
        failures += not healthy
    print(json.dumps({"seconds": [round(seconds, 5) for seconds in measured], "failures": failures}))


if __name__ == "__main__":
    main(sys.argv[1])
