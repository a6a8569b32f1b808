"""`outrider bench serve`: latency and goodput of a running server under load.

Closed loop: each client sends its next request once its last one is answered. Open loop: requests arrive as a Poisson process
at a given rate, however slow the server is, which shows queueing. Goodput counts answers whose first token met the target.
"""

import asyncio
import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.progress import Progress

from bench import report
from bench.plan import BenchError

TIMEOUT_SECONDS = 120.0
TIMES = ("first_token_ms", "between_packets_ms", "end_to_end_ms")


@dataclass(frozen=True)
class Load:
    """The requests to send."""

    prompts: Sequence[str]
    seconds: float  # per level
    max_tokens: int
    temperature: float
    drafter: str
    target_ms: float  # limit of the time to first token
    key: str | None = None
    seed: int = 0


@dataclass
class Outcome:
    """Result of one request."""

    status: int = 0  # 0 = no response
    started: float = 0.0  # time.perf_counter()
    seconds: float = 0.0
    first_token: float = 0.0  # seconds from the start
    gaps: list[float] = field(default_factory=list)  # between packets, seconds
    tokens: list[int] = field(default_factory=list)  # ids
    error: str = ""  # message of an error in the stream, or name of a connection error

    @property
    def answered(self) -> bool:
        return self.status == 200 and not self.error


async def stream(client: httpx.AsyncClient, fields: dict[str, Any]) -> Outcome:
    """Sends a streaming completion request, and times its packets."""
    outcome = Outcome(started=time.perf_counter())
    arrivals: list[float] = []
    try:
        body = fields | {"stream": True, "return_token_ids": True}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            outcome.status = response.status_code
            if outcome.status != 200:
                await response.aread()
            else:
                async for line in response.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    arrivals.append(time.perf_counter())
                    chunk = json.loads(line[6:])
                    if "error" in chunk:
                        outcome.error = chunk["error"]["message"]
                    for choice in chunk.get("choices", ()):
                        outcome.tokens += choice.get("token_ids") or ()
    except httpx.HTTPError as error:
        outcome.error = type(error).__name__
    outcome.seconds = time.perf_counter() - outcome.started
    if arrivals:
        outcome.first_token = arrivals[0] - outcome.started
        outcome.gaps = [b - a for a, b in itertools.pairwise(arrivals)]
    return outcome


def new_client(url: str) -> httpx.AsyncClient:
    """A client without a limit on concurrent connections."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    return httpx.AsyncClient(base_url=url, timeout=TIMEOUT_SECONDS, limits=limits)


class Clients:
    """Sends requests and collects their outcomes."""

    def __init__(self, load: Load, client: httpx.AsyncClient, model: str) -> None:
        self._load = load
        self._client = client
        self._model = model
        self._rng = random.Random(load.seed)
        self.outcomes: list[Outcome] = []

    async def send(self) -> None:
        """Sends one request and waits for its answer."""
        load, number = self._load, len(self.outcomes)
        fields: dict[str, Any] = {
            "model": self._model,
            "prompt": self._rng.choice(load.prompts),
            "max_tokens": load.max_tokens,
            "temperature": load.temperature,
            "seed": number,
            "speculation": {"drafter": load.drafter},
        }
        self.outcomes.append(await stream(self._client, fields))

    async def closed(self, clients: int) -> None:
        """Sends requests from `clients` concurrent clients for the time of the level."""
        end = time.perf_counter() + self._load.seconds

        async def run_client() -> None:
            while time.perf_counter() < end:
                await self.send()

        await asyncio.gather(*(run_client() for _ in range(clients)))

    async def open(self, rate: float) -> None:
        """Sends `rate` requests per second for the time of the level, then waits for all answers."""
        start = arrival = time.perf_counter()
        tasks = []
        while (arrival := arrival + self._rng.expovariate(rate)) < start + self._load.seconds:
            await asyncio.sleep(max(0.0, arrival - time.perf_counter()))
            tasks.append(asyncio.ensure_future(self.send()))
        await asyncio.gather(*tasks)


def figures(load: Load, kind: str, level: float, outcomes: Sequence[Outcome], seconds: float) -> dict[str, Any]:
    answered = [outcome for outcome in outcomes if outcome.answered]
    in_time = [outcome for outcome in answered if 1e3 * outcome.first_token <= load.target_ms]
    return {
        "loop": kind,
        "level": level,
        "requests": len(outcomes),
        "statuses": dict(Counter(str(outcome.status) for outcome in outcomes)),
        "errors": sum(bool(outcome.error) for outcome in outcomes),
        "answers_per_second": round(len(answered) / seconds, 3),
        "goodput_per_second": round(len(in_time) / seconds, 3),
        "tokens_per_second": round(sum(len(outcome.tokens) for outcome in answered) / seconds, 1),
        "first_token_ms": report.quantiles([outcome.first_token for outcome in answered]),
        "between_packets_ms": report.quantiles([gap for outcome in answered for gap in outcome.gaps]),
        "end_to_end_ms": report.quantiles([outcome.seconds for outcome in answered]),
    }


async def run_levels(url: str, load: Load, rates: Sequence[float], concurrencies: Sequence[int]) -> list[dict[str, Any]]:
    rows = []
    async with new_client(url) as client:
        if load.key:
            client.headers["Authorization"] = f"Bearer {load.key}"
        model = str((await client.get("/v1/models")).json()["data"][0]["id"])
        levels = [("closed", float(count)) for count in concurrencies] + [("open", rate) for rate in rates]
        with Progress() as progress:
            task = progress.add_task("load", total=len(levels))
            for kind, level in levels:
                clients = Clients(load, client, model)
                started = time.perf_counter()
                await (clients.closed(int(level)) if kind == "closed" else clients.open(level))
                rows.append(figures(load, kind, level, clients.outcomes, time.perf_counter() - started))
                progress.advance(task)
    return rows


def run(url: str, load: Load, rates: Sequence[float], concurrencies: Sequence[int], out: Path | None) -> list[dict[str, Any]]:
    """Measures, prints, and saves the figures if `out` is given. Raises BenchError if no server answers."""
    try:
        rows = asyncio.run(run_levels(url, load, rates, concurrencies))
    except (httpx.TransportError, KeyError) as error:
        raise BenchError(f"No server answers at {url} ({type(error).__name__}); start one, or correct --url.") from None
    show(rows, load)
    if out:
        settings = {name: value for name, value in vars(load).items() if name not in ("prompts", "key")}
        report.save(out, {**settings, "prompts": len(load.prompts), "results": rows})
    return rows


def show(rows: Sequence[dict[str, Any]], load: Load) -> None:
    """Prints two tables: rates and responses by status, and times."""
    report.print_table(
        "Rates per second, by load",
        ("loop", "level", "answers/s", "goodput/s", "tokens/s", "status\n200", "status\n429", "other\nstatus"),
        [
            (
                row["loop"],
                f"{row['level']:g}",
                *(row[f"{name}_per_second"] for name in ("answers", "goodput", "tokens")),
                *count_statuses(row["statuses"]),
            )
            for row in rows
        ],
        "level: clients (closed loop) or requests per second (open loop); "
        f"goodput: answers with a first token within {load.target_ms:g} ms; other status: errors, or no response.",
    )
    report.print_table(
        "Milliseconds, by load",
        ("loop", "level", *(f"{name}\n{share}" for name in ("TTFT", "ITL", "total") for share in ("p50", "p99"))),
        [
            (row["loop"], f"{row['level']:g}", *(row[name].get(share) for name in TIMES for share in ("p50", "p99")))
            for row in rows
        ],
        "TTFT: time to first token; ITL: between two packets; total: the whole answer.",
    )


def count_statuses(statuses: Mapping[str, int]) -> tuple[int, int, int]:
    """Responses with status 200, with 429, and all others."""
    answered, refused = statuses.get("200", 0), statuses.get("429", 0)
    return answered, refused, sum(statuses.values()) - answered - refused
