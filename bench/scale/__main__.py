"""`python -m bench.scale`: one replica to many, which sleep instead of computing. Needs the extra `ray`.

Two parts: the time to the first token on one machine and through Ray, by turns; and for 1, 4, 16 ... replicas the throughput
and the share of later turns that reach the replica of their conversation, with half as many, as many and twice as many clients
as the replicas serve at once. Clients, ingress and replicas share the machine's cores: on a cluster, figures are better.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
import uvicorn
from rich.console import Console

from bench import report
from bench.http.client import new_client, served_model
from bench.http.process import free_port
from bench.scale.sleeping import PREFILL_SECONDS, STEP, STEP_TOKENS
from outrider.server.settings import Settings, load_settings

# A replica serves this many requests at once.
ACTIVE = 4
# Clients for each request that the replicas serve at once.
LOADS = {"half": 0.5, "full": 1.0, "double": 2.0}
TURNS = 4
HOST = "127.0.0.1"
# The size of Ray's object store, which nothing here uses.
MEMORY_BYTES = 80 << 20
# The titles of the processes.
PROCESSES = {
    "proxy": "ray::ProxyActor",
    "ingress": "ray::ServeReplica:outrider:ingress",
    "replicas": "ray::ServeReplica:outrider:replica",
}
# Ray is told of this many cores, and starts one idle process for each.
CORES = 4


@dataclass
class Answers:
    """What the clients have received."""

    first_token_seconds: list[float] = field(default_factory=list)
    events: int = 0  # until the load's time is over; what has begun is then finished
    later_turns: int = 0
    on_their_replica: int = 0  # of the later turns
    errors: list[str] = field(default_factory=list)
    seconds: float = 0.0
    cpu_seconds: dict[str, float] = field(default_factory=dict)

    @property
    def events_per_second(self) -> float:
        return self.events / self.seconds


async def converse(client: httpx.AsyncClient, model: str, name: str, tokens: int, until: float, answers: Answers) -> None:
    """Conversations of TURNS turns, one after the other. Begins no turn after `time.perf_counter()` has reached `until`."""
    number = 0
    while time.perf_counter() < until:
        messages = [{"role": "user", "content": f"Conversation {number} of client {name}."}]
        number += 1
        for turn in range(TURNS):
            if turn and time.perf_counter() >= until:
                return
            body = {"model": model, "messages": messages, "max_tokens": tokens, "stream": True, "ignore_eos": True}
            started, first = time.perf_counter(), 0.0
            text, cached = "", 0
            async with client.stream(
                "POST", "/v1/chat/completions", json=body | {"stream_options": {"include_usage": True}}
            ) as response:
                async for line in response.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    event = json.loads(line[6:])
                    if "error" in event:
                        answers.errors.append(event["error"]["code"])
                    for choice in event.get("choices", ()):
                        if content := choice["delta"].get("content"):
                            first = first or time.perf_counter() - started
                            answers.events += time.perf_counter() < until
                            text += content
                    if usage := event.get("usage"):
                        cached = usage["prompt_tokens_details"]["cached_tokens"]
                if response.status_code != 200:
                    answers.errors.append(str(response.status_code))
                    continue
            answers.first_token_seconds.append(first)
            if turn:
                answers.later_turns += 1
                answers.on_their_replica += cached > 0
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Go on."}]


async def load(url: str, clients: int, tokens: int, seconds: float) -> Answers:
    """The answers to this number of concurrent clients."""
    answers = Answers(seconds=seconds)
    async with new_client(url) as client:
        model = await served_model(client)
        before, until = cpu_seconds(), time.perf_counter() + seconds
        work = [asyncio.create_task(converse(client, model, str(n), tokens, until, answers)) for n in range(clients)]
        await asyncio.sleep(seconds)
        answers.cpu_seconds = {name: used - before[name] for name, used in cpu_seconds().items()}
        await asyncio.gather(*work)
    return answers


def cpu_seconds() -> dict[str, float]:
    """CPU time of Ray's proxy, of the ingress, of all replicas, and of the clients, who are in this process."""
    used = dict.fromkeys(PROCESSES, 0.0) | {"clients": time.process_time()}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            title = (process / "cmdline").read_text()
            for name, start in PROCESSES.items():
                if title.startswith(start):
                    user, system = (process / "stat").read_text().rpartition(")")[2].split()[11:13]
                    used[name] += (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    return used


@contextmanager
def one_machine(settings: Settings) -> Iterator[str]:
    """The server of one machine with a sleeping engine, in a thread; its address."""
    from bench.scale.sleeping import SleepingEngine
    from outrider.server.app import create_app
    from outrider.verify.tokenizer import load_tokenizer

    app = create_app(settings, load_tokenizer(settings.model.path), new_engine=SleepingEngine)
    listener = socket.create_server((HOST, 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://{HOST}:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


@contextmanager
def cluster(settings: Settings) -> Iterator[None]:
    """A Ray cluster of one node, and Serve on it."""
    import ray
    from ray import serve

    ray.init("local", num_cpus=CORES, object_store_memory=MEMORY_BYTES, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": HOST, "port": settings.server.port})
    try:
        yield
    finally:
        ray.shutdown()  # ends the cluster, and Serve with it


async def deployed(settings: Settings, replicas: int, ingresses: int) -> str:
    """Deploys this number of sleeping replicas; returns once each has answered, with the address."""
    from ray import serve

    from bench.scale.sleeping import SleepingReplica
    from outrider.server.ray.deployment import application
    from outrider.server.ray.scale import Scale

    scale = Scale(replicas=replicas, ingress_replicas=ingresses, cpus=0.1, ingress_cpus=0.1)
    await asyncio.to_thread(serve.run, application(settings, scale, SleepingReplica), name="outrider")
    url = f"http://{HOST}:{settings.server.port}"
    async with new_client(url) as client:
        while (await client.get("/ready")).status_code != 200:
            await asyncio.sleep(0.2)
    await load(url, ACTIVE * replicas, 1, 3.0)  # the ingress learns of the last replica after Serve says that it runs
    return url


async def added_latency(settings: Settings, alone: str, cluster: str, requests: int) -> dict[str, Any]:
    """The time to the first token on one machine and through Ray, one request at a time, by turns."""
    found: dict[str, list[float]] = {alone: [], cluster: []}
    for _ in range(requests):
        for url, seconds in found.items():
            seconds += (await load(url, 1, 1, 0.001)).first_token_seconds
    alone_ms, ray_ms = report.quantiles(found[alone]), report.quantiles(found[cluster])
    return {"one_machine_ms": alone_ms, "ray_ms": ray_ms, "added_ms_p50": round(ray_ms["p50"] - alone_ms["p50"], 2)}


def summary(answers: Answers) -> dict[str, Any]:
    """The figures of a load."""
    return {
        "events_per_second": round(answers.events_per_second, 1),
        "first_token_ms": report.quantiles(answers.first_token_seconds),
        "affinity": round(answers.on_their_replica / max(1, answers.later_turns), 4),
        "later_turns": answers.later_turns,
        "cpu_share": {name: round(used / answers.seconds, 3) for name, used in answers.cpu_seconds.items()},
        "cpu_us_per_event": {name: round(1e6 * used / answers.events, 1) for name, used in answers.cpu_seconds.items()},
        "errors": answers.errors,
    }


async def measure(settings: Settings, most: int, ingresses: int, tokens: int, seconds: float, requests: int) -> dict[str, Any]:
    """All figures."""
    rounds: list[dict[str, Any]] = []
    url = await deployed(settings, 1, ingresses)
    with one_machine(settings) as alone:
        latency = await added_latency(settings, alone, url, requests)
    count = 1
    while count <= most:
        url = await deployed(settings, count, ingresses)
        loads = {name: await load(url, max(1, int(ACTIVE * count * share)), tokens, seconds) for name, share in LOADS.items()}
        busiest = loads["double"].events_per_second
        first = rounds[0]["double"]["events_per_second"] if rounds else busiest
        figures = {name: summary(answers) for name, answers in loads.items()}
        rounds.append({"replicas": count, "over_one_replica": round(busiest / first, 2), **figures})
        Console().print(rounds[-1])
        count *= 4
    return {"latency": latency, "scale": rounds}


def main(
    replicas: Annotated[int, typer.Option(help="The largest number of replicas.", min=1)] = 16,
    ingress_replicas: Annotated[int, typer.Option(help="Processes that answer HTTP.", min=1)] = 1,
    tokens: Annotated[int, typer.Option(help="Tokens per answer.", min=1)] = 32,
    step_seconds: Annotated[float, typer.Option(help="Time of a step.")] = 0.25,
    seconds: Annotated[float, typer.Option(help="Duration of each load.")] = 20.0,
    requests: Annotated[int, typer.Option(help="Requests to each server in the comparison with one machine.")] = 100,
    out: Annotated[Path, typer.Option(help="Save the figures as JSON.")] = report.RESULTS / "scale.json",
) -> None:
    """Measure a Ray cluster on this machine."""
    from outrider.server.ray.command import ENVIRONMENT

    os.environ |= ENVIRONMENT | {STEP: str(step_seconds), "RAY_USAGE_STATS_ENABLED": "0", "RAY_memory_monitor_refresh_ms": "0"}
    os.environ["RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S"] = "1"  # nobody uses the ingress that is replaced
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 1 << 16)), hard))
    flags = {"server.port": free_port(), "logging.requests": False, "scheduling.max_active": ACTIVE}
    settings = load_settings(None, flags)
    options = {
        "ingress_replicas": ingress_replicas,
        "step_seconds": step_seconds,
        "step_tokens": STEP_TOKENS,
        "prefill_seconds": PREFILL_SECONDS,
        "active": ACTIVE,
    }
    with cluster(settings):
        figures = asyncio.run(measure(settings, replicas, ingress_replicas, tokens, seconds, requests))
    Console().print(figures["latency"])
    report.save(out, options | figures)


if __name__ == "__main__":
    typer.run(main)
