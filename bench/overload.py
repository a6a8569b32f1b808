"""`python -m bench.overload`: five times as many requests as the server can serve, and a worker killed under load.

The first part measures the latency of admitted requests and the time to refuse the others. The second part measures how long
the server is unavailable, and checks that only running requests are lost.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console

from bench import report
from bench.http.client import Outcome, complete, metric, new_client, quantiles, served_model, sleep_until, stream
from bench.http.process import ServerProcess, find_worker, start_server
from bench.plan import PROMPTS, read_prompts

ACTIVE, WAITING = 4, 16
FLAGS = [
    *("--model.dtype", "float32", "--model.threads", "1", "--logging.requests", "false"),
    *("--scheduling.max_active", str(ACTIVE), "--scheduling.max_waiting", str(WAITING)),
]
TOKENS = 256
FACTOR = 5
PROBE_SECONDS = 15.0


def request_fields(model: str, number: int) -> dict[str, Any]:
    """The body of a request whose answer has TOKENS tokens."""
    prompts = read_prompts(PROMPTS)
    options = {"temperature": 0.9, "seed": number, "max_tokens": TOKENS, "ignore_eos": True}
    return {"model": model, "prompt": prompts[number % len(prompts)], **options}


async def capacity(client: httpx.AsyncClient, model: str) -> float:
    """Requests per second with ACTIVE concurrent clients."""
    await asyncio.gather(*(complete(client, request_fields(model, number)) for number in range(2 * ACTIVE)))  # warms up
    end, done = time.perf_counter() + PROBE_SECONDS, 0

    async def run_client(first: int) -> None:
        nonlocal done
        number = first
        while time.perf_counter() < end:
            answered = (await complete(client, request_fields(model, number))).answered
            done += answered  # a separate statement: `done += await ...` would read `done` before the await
            number += ACTIVE

    started = time.perf_counter()
    await asyncio.gather(*(run_client(number) for number in range(ACTIVE)))
    return done / (time.perf_counter() - started)


async def overload(url: str, seconds: float) -> dict[str, Any]:
    """An open loop at FACTOR times the capacity."""
    async with new_client(url) as client:
        model = await served_model(client)
        rate = await capacity(client, model)
        started = time.perf_counter()
        tasks, max_waiting = [], 0.0
        for number in range(int(seconds * FACTOR * rate)):
            await sleep_until(started + number / (FACTOR * rate))
            tasks.append(asyncio.ensure_future(stream(client, request_fields(model, number))))
            if number % 20 == 0:
                max_waiting = max(max_waiting, await metric(client, "outrider_requests_waiting"))
        outcomes: list[Outcome] = await asyncio.gather(*tasks)
        elapsed = max(outcome.started + outcome.seconds for outcome in outcomes) - started
        return {
            "capacity_requests_per_second": round(rate, 2),
            "offered_requests_per_second": round(FACTOR * rate, 2),
            "seconds": seconds,
            "statuses": dict(Counter(str(outcome.status) for outcome in outcomes)),
            "errors": dict(Counter(outcome.error for outcome in outcomes if outcome.error)),
            "answered_ms": quantiles([outcome.seconds for outcome in outcomes if outcome.answered]),
            # A request waits for all queued and running ones, which are served at the rate of this run.
            "bound_ms": round(1e3 * (WAITING + 2 * ACTIVE) * elapsed / sum(outcome.answered for outcome in outcomes)),
            "refused_ms": quantiles([outcome.seconds for outcome in outcomes if outcome.status == 429]),
            "most_waiting": [max_waiting, WAITING],
        }


async def kill(server: ServerProcess) -> dict[str, Any]:
    """Kills the worker while requests run and others wait."""
    async with new_client(server.url) as client:
        model = await served_model(client)
        busy = [asyncio.ensure_future(stream(client, request_fields(model, number))) for number in range(ACTIVE)]
        while await metric(client, "outrider_requests_running") < ACTIVE:
            await asyncio.sleep(0.01)
        waiting = [
            asyncio.ensure_future(complete(client, request_fields(model, 10 + number) | {"max_tokens": 4}))
            for number in range(8)
        ]
        while await metric(client, "outrider_requests_waiting") < len(waiting):
            await asyncio.sleep(0.005)
        worker = find_worker(server.process.pid)
        assert worker is not None
        killed = time.perf_counter()
        os.kill(worker, signal.SIGKILL)
        lost, served = await asyncio.gather(*busy), await asyncio.gather(*waiting)
        loads = [float(match[1]) for line in server.log if (match := re.search(r"ready after ([\d.]+) s", line))]
        return {
            "at_work": dict(Counter("lost" if not outcome.answered else "answered" for outcome in lost)),
            "waiting": dict(Counter(str(outcome.status) for outcome in served)),
            "next_served_after_seconds": round(min(outcome.started + outcome.seconds for outcome in served) - killed, 2),
            "model_load_seconds": loads,
            "restarts": await metric(client, "outrider_worker_restarts_total"),
        }


def main(
    seconds: Annotated[float, typer.Option(help="Duration of the overload.")] = 120.0,
    out: Annotated[Path, typer.Option(help="Save the figures as JSON.")] = report.RESULTS / "overload.json",
) -> None:
    """Overload a server, and kill its worker."""
    with start_server(FLAGS) as server:
        figures = {"overload": asyncio.run(overload(server.url, seconds)), "kill": asyncio.run(kill(server))}
    Console().print(figures)
    report.save(out, figures)


if __name__ == "__main__":
    typer.run(main)
