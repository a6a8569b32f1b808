"""Server processes: starts one on a free port, and reads its log."""

import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from bench.plan import BenchError

START_SECONDS = 300
STOP_SECONDS = 60
TIMEOUT_SECONDS = 600


@dataclass
class ServerProcess:
    name: str  # of its module
    url: str
    client: httpx.Client
    process: subprocess.Popen[bytes]
    log_file: Path
    seconds_to_start: float = 0.0  # set once it is ready

    @property
    def log(self) -> list[str]:
        """The lines that it has written."""
        return self.log_file.read_text(errors="replace").splitlines()

    def wait_until_ready(self, path: str) -> None:
        """Polls a path until its status is 200. Raises BenchError if the process ends, or after START_SECONDS."""
        started = time.perf_counter()
        while time.perf_counter() < started + START_SECONDS and self.process.poll() is None:
            with suppress(httpx.TransportError):  # it does not listen yet
                if self.client.get(path).status_code == 200:
                    self.seconds_to_start = time.perf_counter() - started
                    return
            time.sleep(0.02)
        last = next((line.strip() for line in reversed(self.log) if line.strip()), "it printed nothing")
        raise BenchError(f"{self.name} did not start: {last}")


@contextmanager
def start(arguments: Sequence[str], ready: str, environment: Mapping[str, str] | None = None) -> Iterator[ServerProcess]:
    """Runs `python -m ARGUMENTS --port PORT`, waits until the path `ready` answers, and ends it at last. Raises BenchError.

    Its environment is this process's by default.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with tempfile.NamedTemporaryFile(suffix=".log") as log, httpx.Client(base_url=url, timeout=TIMEOUT_SECONDS) as client:
        # In a session of its own, Ctrl-C reaches this process only, which then ends the server.
        process = subprocess.Popen(
            [sys.executable, "-m", *arguments, "--port", str(port)],
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=environment,
        )
        server = ServerProcess(arguments[0], url, client, process, Path(log.name))
        try:
            server.wait_until_ready(ready)
            yield server
        finally:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def start_server(flags: Sequence[str], environment: Mapping[str, str] | None = None) -> AbstractContextManager[ServerProcess]:
    """`outrider serve`, until it is ready."""
    return start(["outrider.server.cli", "serve", *flags], "/ready", environment)


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
