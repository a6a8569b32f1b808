"""`python -m bench.overload`: five times as many requests as the server can take, and a worker that is killed under load.

The first shows what those get who are let in, and how quickly the others are told to come again; the second how long nobody is
served, and that only what the worker was at is lost.
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
from bench.decode import read_prompts
from bench.http.client import Outcome, metric, model_of, new_client, quantiles, stream, until, whole, worker_of
from bench.http.serve import Own, server

PROMPTS = Path(__file__).parent / "prompts.jsonl"
ACTIVE, WAITING = 4, 16
FLAGS = [
    *("--model.dtype", "float32", "--model.threads", "1", "--logging.requests", "false"),
    *("--scheduling.max_active", str(ACTIVE), "--scheduling.max_waiting", str(WAITING)),
]
TOKENS = 256
FACTOR = 5
PROBE_SECONDS = 15.0


def asked(model: str, number: int) -> dict[str, Any]:
    """A request whose answer is always as long."""
    prompts = read_prompts(PROMPTS, None)
    options = {"temperature": 0.9, "seed": number, "max_tokens": TOKENS, "ignore_eos": True}
    return {"model": model, "prompt": prompts[number % len(prompts)], **options}


async def capacity(client: httpx.AsyncClient, model: str) -> float:
    """Requests a second with as many at once as are active."""
    await asyncio.gather(*(whole(client, asked(model, number)) for number in range(2 * ACTIVE)))  # warms up
    end, done = time.perf_counter() + PROBE_SECONDS, 0

    async def keep_asking(first: int) -> None:
        nonlocal done
        number = first
        while time.perf_counter() < end:
            answered = (await whole(client, asked(model, number))).answered
            done += answered  # in one go: what is read before an await is old after it
            number += ACTIVE

    started = time.perf_counter()
    await asyncio.gather(*(keep_asking(number) for number in range(ACTIVE)))
    return done / (time.perf_counter() - started)


async def overload(url: str, seconds: float) -> dict[str, Any]:
    """An open loop at FACTOR times the capacity."""
    async with new_client(url) as client:
        model = await model_of(client)
        rate = await capacity(client, model)
        started = time.perf_counter()
        tasks, most_waiting = [], 0.0
        for number in range(int(seconds * FACTOR * rate)):
            await until(started + number / (FACTOR * rate))
            tasks.append(asyncio.ensure_future(stream(client, asked(model, number))))
            if number % 20 == 0:
                most_waiting = max(most_waiting, await metric(client, "outrider_requests_waiting"))
        outcomes: list[Outcome] = await asyncio.gather(*tasks)
        took = max(out.started + out.seconds for out in outcomes) - started
        return {
            "capacity_requests_per_second": round(rate, 2),
            "offered_requests_per_second": round(FACTOR * rate, 2),
            "seconds": seconds,
            "statuses": dict(Counter(str(out.status) for out in outcomes)),
            "errors": dict(Counter(out.error for out in outcomes if out.error)),
            "answered_ms": quantiles([out.seconds for out in outcomes if out.answered]),
            # All who wait and all at work go first, at the rate of these two minutes.
            "bound_ms": round(1e3 * (WAITING + 2 * ACTIVE) * took / sum(out.answered for out in outcomes)),
            "refused_ms": quantiles([out.seconds for out in outcomes if out.status == 429]),
            "most_waiting": [most_waiting, WAITING],
        }


async def kill(own: Own) -> dict[str, Any]:
    """Kills the worker while it is at work and others wait."""
    async with new_client(own.url) as client:
        model = await model_of(client)
        busy = [asyncio.ensure_future(stream(client, asked(model, number))) for number in range(ACTIVE)]
        while await metric(client, "outrider_requests_running") < ACTIVE:
            await asyncio.sleep(0.01)
        waiting = [asyncio.ensure_future(whole(client, asked(model, 10 + number) | {"max_tokens": 4})) for number in range(8)]
        while await metric(client, "outrider_requests_waiting") < len(waiting):
            await asyncio.sleep(0.005)
        worker = worker_of(own.process.pid)
        assert worker is not None
        killed = time.perf_counter()
        os.kill(worker, signal.SIGKILL)
        lost, served = await asyncio.gather(*busy), await asyncio.gather(*waiting)
        loads = [float(found[1]) for line in own.log if (found := re.search(r"ready after ([\d.]+) s", line))]
        return {
            "at_work": dict(Counter("lost" if not out.answered else "answered" for out in lost)),
            "waiting": dict(Counter(str(out.status) for out in served)),
            "next_served_after_seconds": round(min(out.started + out.seconds for out in served) - killed, 2),
            "model_load_seconds": loads,
            "restarts": await metric(client, "outrider_worker_restarts_total"),
        }


def main(
    seconds: Annotated[float, typer.Option(help="How long the overload lasts.")] = 120.0,
    out: Annotated[Path, typer.Option(help="Where the figures go.")] = report.RESULTS / "overload.json",
) -> None:
    """Overloads a server of its own, and kills its worker."""
    with server(FLAGS) as own:
        figures = {"overload": asyncio.run(overload(own.url, seconds)), "kill": asyncio.run(kill(own))}
    Console().print(figures)
    report.save(out, figures)


if __name__ == "__main__":
    typer.run(main)
