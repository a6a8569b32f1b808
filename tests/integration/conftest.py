"""A real server process with the embedded model, in float32 so that equal means equal."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest

START_SECONDS = 180


@dataclass
class Served:
    """A running server and clients for it."""

    process: subprocess.Popen[str]
    url: str
    http: httpx.Client
    client: openai.OpenAI
    model: str
    log: list[str]  # lines that the server has written


def start(*flags: str) -> tuple[subprocess.Popen[str], str]:
    """Starts `outrider serve` on a free port; returns the process and its address."""
    costs = str(Path(tempfile.gettempdir()) / "outrider-tests")
    command = [sys.executable, "-m", "server.cli", "serve", "--port", "0", "--model.threads", "1"]
    command += ["--speculation.cost_folder", costs, *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    assert process.stderr is not None
    line = process.stderr.readline()
    found = re.search(r"http://\S+(?=/v1)", line)
    assert found, line
    return process, found[0]


def wait_ready(url: str) -> None:
    """Returns when the worker has loaded."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if httpx.get(f"{url}/ready").status_code == 200:
            return
        time.sleep(0.1)
    raise TimeoutError("the server did not get ready")


@contextmanager
def serving(*flags: str, key: str = "none") -> Iterator[Served]:
    """A server process that is ready, and clients that send `key`."""
    process, url = start(*flags)
    log: list[str] = []
    reader = threading.Thread(target=lambda: log.extend(process.stderr or ()), daemon=True)  # a full pipe stops a server
    reader.start()
    try:
        wait_ready(url)
        with (
            httpx.Client(base_url=url, timeout=60, headers={"Authorization": f"Bearer {key}"}) as http,
            openai.OpenAI(base_url=f"{url}/v1", api_key=key) as client,
        ):
            yield Served(process, url, http, client, client.models.list().data[0].id, log)
    finally:
        process.terminate()
        process.wait(60)
        reader.join()
        assert process.stderr is not None
        process.stderr.close()


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    with serving("--model.dtype", "float32", "--limits.body_bytes", "200000") as server:
        yield server
