"""`outrider bench serve --rate/--concurrency`: load on a running server, and what each of its clients sees.

Closed loop: so many clients, each asks again when it is answered. Open loop: requests come at a rate by lot (Poisson), however
the server fares, which is what shows queues. Goodput is the rate of answers whose first token came within the target.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench import report
from bench.decode import BenchError
from bench.http.client import Outcome, model_of, new_client, quantiles, stream, until


@dataclass(frozen=True)
class Load:
    """What is asked."""

    prompts: Sequence[str]
    seconds: float  # of each level
    max_tokens: int
    temperature: float
    drafter: str
    sessions: float  # the share of requests that belong to one of a few sessions
    target_ms: float  # for the first token
    key: str | None = None
    seed: int = 0


class Clients:
    """Asks, and remembers what came of it."""

    def __init__(self, load: Load, client: httpx.AsyncClient, model: str) -> None:
        self._load = load
        self._client = client
        self._model = model
        self._lots = random.Random(load.seed)
        self.outcomes: list[Outcome] = []

    async def ask(self) -> None:
        """One request."""
        load, number = self._load, len(self.outcomes)
        fields: dict[str, Any] = {
            "model": self._model,
            "prompt": self._lots.choice(load.prompts),
            "max_tokens": load.max_tokens,
            "temperature": load.temperature,
            "seed": number,
            "speculation": {"drafter": load.drafter},
        }
        if self._lots.random() < load.sessions:
            fields["session_id"] = f"load {self._lots.randrange(4)}"
        self.outcomes.append(await stream(self._client, fields))

    async def closed(self, clients: int) -> None:
        """So many at once, for the set time."""
        end = time.perf_counter() + self._load.seconds

        async def one() -> None:
            while time.perf_counter() < end:
                await self.ask()

        await asyncio.gather(*(one() for _ in range(clients)))

    async def open(self, rate: float) -> None:
        """So many a second, for the set time; then until all are answered."""
        start = at = time.perf_counter()
        tasks = []
        while (at := at + self._lots.expovariate(rate)) < start + self._load.seconds:
            await until(at)
            tasks.append(asyncio.ensure_future(self.ask()))
        await asyncio.gather(*tasks)


def figures(load: Load, kind: str, level: float, outcomes: Sequence[Outcome], seconds: float) -> dict[str, Any]:
    """One level as it is reported."""
    answered = [out for out in outcomes if out.answered]
    good = [out for out in answered if 1e3 * out.first_token <= load.target_ms]
    return {
        "loop": kind,
        "level": level,
        "requests": len(outcomes),
        "statuses": dict(Counter(str(out.status) for out in outcomes)),
        "errors": sum(bool(out.error) for out in outcomes),
        "answers_per_second": round(len(answered) / seconds, 3),
        "goodput_per_second": round(len(good) / seconds, 3),
        "tokens_per_second": round(sum(len(out.tokens) for out in answered) / seconds, 1),
        "first_token_ms": quantiles([out.first_token for out in answered]),
        "between_packets_ms": quantiles([gap for out in answered for gap in out.gaps]),
        "end_to_end_ms": quantiles([out.seconds for out in answered]),
    }


async def levels(url: str, load: Load, rates: Sequence[float], concurrencies: Sequence[int]) -> list[dict[str, Any]]:
    """All of them, one after the other."""
    rows = []
    async with new_client(url) as client:
        if load.key:
            client.headers["Authorization"] = f"Bearer {load.key}"
        model = await model_of(client)
        wanted = [("closed", float(count)) for count in concurrencies] + [("open", rate) for rate in rates]
        with Progress() as progress:
            task = progress.add_task("load", total=len(wanted))
            for kind, level in wanted:
                clients = Clients(load, client, model)
                started = time.perf_counter()
                await (clients.closed(int(level)) if kind == "closed" else clients.open(level))
                rows.append(figures(load, kind, level, clients.outcomes, time.perf_counter() - started))
                progress.advance(task)
    return rows


def run(
    url: str, load: Load, rates: Sequence[float], concurrencies: Sequence[int], out: Path | None, plot: Path | None
) -> list[dict[str, Any]]:
    """Measures and prints. Raises BenchError where there is no server."""
    try:
        rows = asyncio.run(levels(url, load, rates, concurrencies))
    except (httpx.TransportError, KeyError) as error:
        raise BenchError(f"No server answers at {url} ({type(error).__name__}); start one, or give the right --url.") from None
    show(rows, load)
    if out:
        asked = {name: value for name, value in vars(load).items() if name not in ("prompts", "key")}
        report.save(out, {**asked, "prompts": len(load.prompts), "results": rows})
    if plot:
        draw(rows, plot)
    return rows


def show(rows: Sequence[dict[str, Any]], load: Load) -> None:
    """The figures as a table."""
    within = f"within {load.target_ms:g} ms"
    quantile_names = ("TTFT p50/p99", "ITL p50/p99", "end p50/p99")
    table = Table("loop", "level", "answers/s", within, "tokens/s", *quantile_names, "statuses")
    for row in rows:
        pairs = (
            f"{row[name].get('p50', '-')} / {row[name].get('p99', '-')}"
            for name in ("first_token_ms", "between_packets_ms", "end_to_end_ms")
        )
        rates = (row["answers_per_second"], row["goodput_per_second"], row["tokens_per_second"])
        statuses = " ".join(f"{status}: {count}" for status, count in row["statuses"].items())
        table.add_row(row["loop"], f"{row['level']:g}", *map(str, rates), *pairs, statuses)
    Console().print(table)


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """First tokens and whole answers by level, p50 and p99, for each kind of loop."""
    import matplotlib.pyplot as plt

    kinds = sorted({row["loop"] for row in rows})
    figure, axes = plt.subplots(1, len(kinds), figsize=(5 * len(kinds), 4), squeeze=False)
    for axis, kind in zip(axes[0], kinds, strict=True):
        mine = [row for row in rows if row["loop"] == kind]
        for name, label in (("first_token_ms", "first token"), ("end_to_end_ms", "whole answer")):
            for share, style in (("p50", "-"), ("p99", ":")):
                values = [row[name].get(share) for row in mine]
                axis.plot([row["level"] for row in mine], values, style, marker="o", label=f"{label}, {share}")
        axis.set_xlabel("clients" if kind == "closed" else "requests per second")
        axis.set_ylabel("ms")
        axis.set_yscale("log")
        axis.set_title(f"{kind} loop")
        axis.legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
