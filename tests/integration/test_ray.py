"""A cluster of several Ray nodes on this machine: the answers of one server, and what is lost when parts are killed."""

import itertools
import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from outrider import models
from tests.servers import Served, wait_until

pytestmark = [
    pytest.mark.ray,
    pytest.mark.xdist_group("ray"),
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),  # Ray's own
]
pytest.importorskip("ray")

PORT = 18080
START_SECONDS = 180
LONG: dict[str, Any] = {"max_tokens": 250, "ignore_eos": True, "speculation": {"max_nodes": 0}}
NODE = {"num_cpus": 2, "object_store_memory": 80 << 20, "include_dashboard": False}


@dataclass
class Stream:
    text: str = ""
    error: dict[str, Any] | None = None
    done: bool = False  # `[DONE]` has arrived
    started: threading.Event = field(default_factory=threading.Event)


def chat_body(content: str, earlier: tuple[dict[str, str], ...] = (), **fields: Any) -> dict[str, Any]:
    message = {"role": "user", "content": content}
    return {"model": models.NAME, "messages": [*earlier, message], "max_tokens": 24, "seed": 7, **fields}


def chat(http: httpx.Client, content: str, earlier: tuple[dict[str, str], ...] = (), **fields: Any) -> dict[str, Any]:
    """The answer to a chat. Raises httpx.HTTPStatusError."""
    response = http.post("/v1/chat/completions", json=chat_body(content, earlier, **fields))
    response.raise_for_status()
    answer: dict[str, Any] = response.json()
    return answer


def text_of(answer: dict[str, Any]) -> str:
    text: str = answer["choices"][0]["message"]["content"]
    return text


def pids(kind: str) -> list[int]:
    """The processes of a deployment; Ray names them after it."""
    title = f"ray::ServeReplica:outrider:{kind}".encode()
    files = Path("/proc").glob("[0-9]*/cmdline")
    return [int(file.parent.name) for file in files if read(file).startswith(title)]


def read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:  # the process has ended
        return b""


def read_stream(http: httpx.Client, stream: Stream, body: dict[str, Any]) -> None:
    """Reads a stream to its end, or until its connection breaks."""
    with suppress(httpx.HTTPError), http.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as response:
        for line in response.iter_lines():
            data = line.removeprefix("data: ")
            stream.done = stream.done or data == "[DONE]"
            if data.startswith("{"):
                event = json.loads(data)
                stream.error = event.get("error", stream.error)
                stream.text += "".join(choice["delta"].get("content") or "" for choice in event.get("choices", ()))
                if stream.text:
                    stream.started.set()
        if response.status_code != 200:
            stream.error = {"code": response.status_code}
    stream.started.set()


@contextmanager
def streams(http: httpx.Client, count: int, started: int, **fields: Any) -> Iterator[list[Stream]]:
    """Long streams of conversations of their own, of which `started` are known to have begun. Ends when all have ended."""
    found = [Stream() for _ in range(count)]
    bodies = [chat_body(f"Write function number {number}.", **{**LONG, **fields}) for number in range(count)]
    with ThreadPoolExecutor(count) as pool:
        tasks = [pool.submit(read_stream, http, stream, body) for stream, body in zip(found, bodies, strict=True)]
        wait_until(lambda: sum(stream.started.is_set() for stream in found) >= started)
        yield found
        for task in tasks:
            task.result()


def wait_ready(http: httpx.Client) -> None:
    """Returns once the ingress answers and has reached a replica."""

    def ready() -> bool:
        try:
            return http.get("/ready").status_code == 200
        except httpx.HTTPError:
            return False

    wait_until(ready, START_SECONDS)


def wait_serving(http: httpx.Client, replicas: int) -> None:
    """Returns once the ingress sends requests to this many replicas."""
    numbers = itertools.count()

    def all_serve() -> bool:
        for _ in range(4):
            chat(http, f"Count to {next(numbers)}.", max_tokens=2)
        decoding = re.findall(r'^outrider_steps_total{replica="(\w+)"} (?!0\.0)', http.get("/metrics").text, flags=re.MULTILINE)
        return len({*decoding}) >= replicas

    wait_until(all_serve, START_SECONDS)


def deploy(replicas: int, ingress_replicas: int = 1, **settings: Any) -> None:
    from ray import serve

    from outrider.server.ray.deployment import application
    from outrider.server.ray.scale import Scale
    from outrider.server.settings import load_settings

    # No costs are measured: those of a busy machine would allow a replica fewer than 4 requests at once.
    flags = {"model.threads": 1, "model.dtype": "float32", "speculation.max_nodes": 12, **settings}
    scale = Scale(replicas=replicas, ingress_replicas=ingress_replicas, ingress_cpus=0.1, cpus=2)
    serve.run(application(load_settings(None, flags), scale), name="outrider")


@pytest.fixture(scope="module")
def deployed() -> Iterator[httpx.Client]:
    """The ingress on a head that has no room for a replica, and two replicas, each on a node of its own."""
    os.environ |= {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_memory_monitor_refresh_ms": "0",  # other programs of this machine may use its memory
        "PYTHONPATH": str(Path(models.__file__).parents[1]),
    }
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args=NODE | {"num_cpus": 1})
    try:
        ray.init(address=cluster.address, log_to_driver=False)
        serve.start(http_options={"host": "127.0.0.1", "port": PORT}, proxy_location="HeadOnly")
        with ThreadPoolExecutor(1) as pool:
            deploying = pool.submit(deploy, replicas=2)
            wait_until(lambda: len(pids("ingress")) == 1, START_SECONDS)  # on the head, the only node until now
            for _ in range(2):
                cluster.add_node(**NODE)
            deploying.result()
        with httpx.Client(base_url=f"http://127.0.0.1:{PORT}", timeout=300, limits=httpx.Limits(max_connections=100)) as http:
            wait_ready(http)
            wait_serving(http, 2)
            yield http
    finally:
        ray.shutdown()
        cluster.shutdown()


def test_answers_are_those_of_one_server(deployed: httpx.Client, served: Served) -> None:
    body = chat_body("Write a function that reverses a list.", temperature=0.7)
    paths = {
        "/v1/chat/completions": body,
        "/v1/completions": {"model": models.NAME, "prompt": "def add(a, b):", "max_tokens": 16, "seed": 3, "n": 2},
        "/v1/messages": {key: body[key] for key in ("model", "messages", "max_tokens")} | {"temperature": 0},
    }
    for path, each in paths.items():
        here, there = deployed.post(path, json=each).json(), served.http.post(path, json=each).json()
        for answer in (here, there):
            for changing in ("id", "created", "timings", "usage"):
                answer.pop(changing, None)
        assert here == there


def test_a_conversation_without_an_id_stays_on_its_replica(deployed: httpx.Client) -> None:
    for number in range(20):
        question = f"{number}. Write a function with a docstring. " * 8  # long: a short beginning is not worth a session
        first = chat(deployed, question)
        earlier = ({"role": "user", "content": question}, {"role": "assistant", "content": text_of(first)})
        second = chat(deployed, "Now add types.", earlier)
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 50, number


def test_a_killed_replica_loses_only_what_it_was_answering(deployed: httpx.Client) -> None:
    fields = {**LONG, "max_tokens": 750}  # so long that none has ended when five have begun
    expected = [text_of(chat(deployed, f"Write function number {number}.", **fields)) for number in range(3)]
    with streams(deployed, 12, started=5, **fields) as found:  # 4 of each replica run, the others wait
        begun = [stream for stream in found if stream.started.is_set()]
        os.kill(pids("replica")[0], signal.SIGKILL)
    failed = [stream for stream in found if stream.error is not None]
    assert 0 < len(failed) <= 8  # what a replica takes; the others wait at the ingress
    assert all(stream in begun or stream.text for stream in failed)
    assert {stream.error["code"] for stream in failed if stream.error} == {"worker_unavailable"}
    assert sum(stream.done for stream in found if stream not in failed) == 12 - len(failed)
    assert all(stream.text == text for stream, text in zip(found[:3], expected, strict=True) if stream not in failed)
    for number in range(3):  # wherever it is answered now
        assert text_of(chat(deployed, f"Write function number {number}.", **fields)) == expected[number]


def test_a_removed_replica_finishes_its_answers(deployed: httpx.Client) -> None:
    with streams(deployed, 6, started=4) as found:
        deploy(replicas=1)
    assert all(stream.done and stream.error is None for stream in found)
    wait_until(lambda: len(pids("replica")) == 1)
