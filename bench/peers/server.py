"""Servers of other programs: starts one on a free port, waits until it answers, and sends it completion requests."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, Any

import httpx

from bench.http.process import START_SECONDS, STOP_SECONDS
from bench.peers.peer import Answer
from bench.plan import BenchError

TIMEOUT_SECONDS = 600.0


@contextmanager
def start(
    name: str, arguments: Sequence[str], ready: str, environment: Mapping[str, str], python: str = sys.executable
) -> Iterator[httpx.Client]:
    """Runs `python -m ARGUMENTS --port PORT` and yields its client once the path `ready` answers. Raises BenchError."""
    port = free_port()
    command = [python, "-m", *arguments, "--port", str(port)]
    with (
        tempfile.TemporaryFile("w+") as log,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=TIMEOUT_SECONDS) as client,
    ):
        # In a session of its own, Ctrl-C reaches this process only, which then ends the server.
        process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | environment, start_new_session=True)
        try:
            wait_until_ready(client, ready, process, lambda: f"{name} did not start: {last_line(log)}")
            yield client
        finally:
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
