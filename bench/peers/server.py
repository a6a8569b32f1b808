"""Servers of other programs: starts one on a free port, waits until it answers, and sends it completion requests.

A server that waits is stopped: some poll, and six idle llama-servers would take a core from the program whose turn it is.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any

import httpx

from bench.http.process import START_SECONDS, STOP_SECONDS
from bench.peers.peer import Answer
from bench.plan import BenchError

TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True)
class PausedServer:
    """A server that runs only inside of `running`."""

    client: httpx.Client
    process: subprocess.Popen[bytes]  # the leader of the group that all of its processes are in

    @contextmanager
    def running(self) -> Iterator[httpx.Client]:
        """The client, as long as the server runs."""
        self.signal(signal.SIGCONT)
        try:
            yield self.client
        finally:
            self.signal(signal.SIGSTOP)

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to all of the server's processes, if they have not ended."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, number)


@contextmanager
def start(
    name: str, arguments: Sequence[str], ready: str, environment: Mapping[str, str], python: str = sys.executable
) -> Iterator[PausedServer]:
    """Runs `python -m ARGUMENTS --port PORT` and yields the server once the path `ready` answers. Raises BenchError."""
    port = free_port()
    command = [python, "-m", *arguments, "--port", str(port)]
    # A connection that is kept open ends when its server runs again, at the moment that the next request is sent.
    unkept = httpx.Limits(max_keepalive_connections=0)
    with (
        tempfile.TemporaryFile("w+") as log,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=TIMEOUT_SECONDS, limits=unkept) as client,
    ):
        # In a session of its own, Ctrl-C reaches this process only, which then ends the server.
        process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | environment, start_new_session=True)
        server = PausedServer(client, process)
        try:
            wait_until_ready(client, ready, process, lambda: f"{name} did not start: {last_line(log)}")
            server.signal(signal.SIGSTOP)
            yield server
        finally:
            server.signal(signal.SIGCONT)
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def wait_until_ready(client: httpx.Client, path: str, process: subprocess.Popen[bytes], failure: Callable[[], str]) -> None:
    """Polls a path. Raises BenchError with the failure if the process ends, or after START_SECONDS."""
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        try:
            if client.get(path).status_code == 200:
                return
        except httpx.TransportError:
            pass  # it does not listen yet
        time.sleep(0.1)
    raise BenchError(failure())


def last_line(log: IO[str]) -> str:
    """The last line of a log that is not empty."""
    log.seek(0)
    return next((line.strip() for line in reversed(log.readlines()) if line.strip()), "it printed nothing")


def complete(client: httpx.Client, fields: Mapping[str, Any], counts_end: bool = True) -> Answer:
    """Sends a completion request and times it until its answer is complete. Raises BenchError if it is refused.

    `counts_end`: whether the server counts the token that ends an answer.
    """
    started = time.perf_counter()
    try:
        response = client.post("/v1/completions", json=dict(fields))
    except httpx.TransportError as error:
        raise BenchError(f"A server did not answer: {error}.") from None
    seconds = time.perf_counter() - started
    if response.status_code != 200:
        raise BenchError(f"A server answered {response.status_code}: {response.text[:200]}")
    body = response.json()
    ended = body["choices"][0]["finish_reason"] == "stop"
    return Answer(body["usage"]["completion_tokens"] + (ended and not counts_end), seconds)
