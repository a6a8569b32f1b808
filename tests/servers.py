"""Server processes that tests share. The embedded model runs in float32, in which drafted answers equal plain decoding.

Each server is started once per test run: `tests/conftest.py` sends all tests of a server to the same pytest-xdist worker.
"""

from __future__ import annotations

import re
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from outrider import models

if TYPE_CHECKING:
    import openai

ROOT = Path(__file__).parents[1]
START_SECONDS = 180
WAIT_SECONDS = 60
COST_FOLDER = Path(tempfile.gettempdir()) / "outrider-tests"
ALICE, BOB, CAROL = "alices-secret-key", "bobs-secret-key", "carols-secret-key"
METRICS = "the-key-of-metrics"
PECULIAR = "def quite_peculiar_name(first_thing, second_thing):\n    return merge(first_thing, second_thing)\n"


@dataclass
class Served:
    process: subprocess.Popen[str]
    url: str
    http: httpx.Client
    client: openai.OpenAI
    model: str
    log: list[str]  # the lines that the server has written

    @contextmanager
    def login(self, key: str) -> Iterator[Served]:
        """The same server with clients that send `key`."""
        with clients(self.url, key) as (http, client):
            yield Served(self.process, self.url, http, client, self.model, self.log)


def start(*flags: str, program: str = "outrider.server.cli") -> tuple[subprocess.Popen[str], str]:
    """Starts `outrider serve` on a free port. Returns the process and its address. `program` is its module."""
    command = [sys.executable, "-m", program, "serve", "--port", "0", "--model.threads", "1"]
    # A fixed number of requests at once, so that no test depends on what was measured.
    command += ["--speculation.cost_folder", str(COST_FOLDER), "--scheduling.max_active", "4", *flags]
    if not {"--model", "--model.path", "--models.paths", "--config"} & {*flags}:
        command += ["--model", models.NAME]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    assert process.stderr is not None
    written = list[str]()
    for line in process.stderr:
        if found := re.search(r"http://\S+(?=/v1)", line):
            return process, found[0]
        written.append(line)
    raise AssertionError("".join(written))


def wait_until(condition: Callable[[], bool], seconds: float = WAIT_SECONDS) -> None:
    """Polls `condition` until it holds. Raises TimeoutError after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the condition did not hold within {seconds:g} s")
        time.sleep(0.01)


def wait_for_metric(server: Served, text: str) -> None:
    """Returns once the server's /metrics page contains `text`."""
    wait_until(lambda: text in read_metrics(server))


def read_metrics(server: Served) -> str:
    return server.http.get("/metrics", headers={"Authorization": f"Bearer {METRICS}"}).text


def worker_of(server: Served) -> int:
    """The process id of the server's worker."""
    for child in children(server.process.pid):
        with suppress(OSError):  # it has ended
            if b"outrider.server.worker.main" in Path(f"/proc/{child}/cmdline").read_bytes():
                return child
    raise AssertionError("the server has no worker")


@lru_cache
def certificates() -> ssl.SSLContext:
    """The system's certificates. Clients share them, since loading them takes longer than a request."""
    return ssl.create_default_context()


@contextmanager
def clients(url: str, key: str) -> Iterator[tuple[httpx.Client, openai.OpenAI]]:
    """A raw client and the official one; both send `key`."""
    import openai

    with (
        httpx.Client(base_url=url, timeout=60, headers={"Authorization": f"Bearer {key}"}, verify=certificates()) as http,
        openai.OpenAI(
            base_url=f"{url}/v1", api_key=key, http_client=openai.DefaultHttpxClient(verify=certificates())
        ) as client,
    ):
        yield http, client


@contextmanager
def serving(*flags: str, key: str = "none", program: str = "outrider.server.cli") -> Iterator[Served]:
    """A ready server process, and clients that send `key`. `program` as in `start`."""
    process, url = start(*flags, program=program)
    log: list[str] = []
    reader = threading.Thread(target=lambda: log.extend(process.stderr or ()), daemon=True)  # a full pipe blocks the server
    reader.start()
    try:
        with clients(url, key) as (http, client):
            wait_until(lambda: http.get("/ready").status_code == 200, START_SECONDS)
            yield Served(process, url, http, client, client.models.list().data[0].id, log)
    finally:
        process.terminate()
        process.wait(WAIT_SECONDS)
        reader.join()
        assert process.stderr is not None
        process.stderr.close()


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    """A server without keys. Every step drafts, whatever drafts cost on this machine."""
    with serving("--model.dtype", "float32", "--limits.body_bytes", "200000", "--speculation.max_nodes", "16") as server:
        yield server


@pytest.fixture(scope="session")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with three keys, a key for its metrics, and JSON logs. The clients send Alice's key.

    Alice has a datastore, Carol a request quota.
    """
    from outrider.server.datastore_builder import build_suffix

    folder = tmp_path_factory.mktemp("guarded")
    (folder / "text.py").write_text(PECULIAR)
    build_suffix([folder / "text.py"], folder / "store", str(models.TARGET))
    (folder / "keys.yaml").write_text(
        f"alice: {{key: {ALICE}, datastores: [{folder / 'store'}]}}\n"
        f"bob: {BOB}\n"
        f"carol: {{key: {CAROL}, requests_per_minute: 600}}\n"
    )
    (folder / "config.yaml").write_text(
        f"auth: {{file: {folder / 'keys.yaml'}}}\n"
        f"model: {{path: {models.NAME}, dtype: float32}}\n"
        "speculation: {max_nodes: 16}\n"
        "limits: {body_bytes: 400000}\n"
        'sessions: {automatic: "off"}\n'  # so that a request without a session is independent of those before it
        "logging: {format: json, level: debug}\n"
        f"metrics: {{key: {METRICS}}}\n"
    )
    with serving("--config", str(folder / "config.yaml"), key=ALICE) as server:
        yield server


def resident_mb(process_id: int | str = "self") -> float:
    """Resident memory of a process, by default of this one, in MiB, without pages of mapped files."""
    status = Path(f"/proc/{process_id}/status").read_text()
    return sum(map(int, re.findall(r"Rss(?:Anon|Shmem):\s+(\d+) kB", status))) / 1024


SHARED_SERVERS = ("served", "guarded")


def children(process_id: int) -> list[int]:
    tasks = Path(f"/proc/{process_id}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]
