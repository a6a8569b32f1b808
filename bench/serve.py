"""`outrider bench serve`: what a client sees of a server, beside the same answers in process.

Starts a server of its own unless it is given the address of one; only its own is compared with in-process decoding, in turns,
since both need the machine. While streams run, /health is asked all the time: the front end must stay responsive.
"""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench import report
from bench.decode import BenchError, Plan, answer, encode
from server.loaded import load
from server.settings import Settings

HEALTH_PAUSE_SECONDS = 0.01
START_SECONDS = 300


@dataclass
class Seen:
    """What clients saw, in seconds."""

    tokens: int = 0
    seconds: float = 0.0  # of whole requests, one after the other
    first_token: list[float] = field(default_factory=list)
    between_chunks: list[float] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        """Over whole requests, reading the prompt included."""
        return self.tokens / self.seconds


def stream(client: httpx.Client, fields: dict[str, Any], seen: Seen) -> None:
    """One streamed completion, timed. Raises BenchError where the server refuses."""
    started = last = time.perf_counter()
    first = True
    with client.stream("POST", "/v1/completions", json=fields) as response:
        if response.status_code != 200:
            raise BenchError(f"The server answered {response.status_code}: {response.read().decode()[:200]}")
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            now = time.perf_counter()
            chunk = msgspec.json.decode(line.removeprefix("data: "))
            if chunk.get("usage"):
                seen.tokens += chunk["usage"]["completion_tokens"]
            elif first:
                seen.first_token.append(now - started)
                first = False
            else:
                seen.between_chunks.append(now - last)
            last = now
    seen.seconds += time.perf_counter() - started


@contextmanager
def server(flags: Sequence[str]) -> Iterator[str]:
    """A server process of our own, ready; yields its address."""
    command = [sys.executable, "-m", "server.cli", "serve", "--port", "0", *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        line = process.stderr.readline()
        found = re.search(r"http://\S+(?=/v1)", line)
        if not found:
            raise BenchError(f"The server did not start: {line.strip()}")
        deadline = time.monotonic() + START_SECONDS
        while httpx.get(f"{found[0]}/ready").status_code != 200:
            if time.monotonic() > deadline or process.poll() is not None:
                raise BenchError("The server did not get ready.")
            time.sleep(0.2)
        yield found[0]
    finally:
        process.terminate()
        process.wait(20)


@contextmanager
def health(url: str) -> Iterator[list[float]]:
    """Asks /health again and again in a thread; the list fills with seconds."""
    found: list[float] = []
    done = threading.Event()

    def ask() -> None:
        with httpx.Client(base_url=url) as client:
            while not done.wait(HEALTH_PAUSE_SECONDS):
                started = time.perf_counter()
                client.get("/health")
                found.append(time.perf_counter() - started)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join()


def run(settings: Settings, flags: Sequence[str], plan: Plan, url: str | None, out: Path | None) -> dict[str, Any]:
    """Measures and prints; with `out`, saves the figures there, too. Raises BenchError."""
    figures: list[dict[str, Any]] = []
    if url:
        try:
            figures += [served(url, plan, temperature) for temperature in plan.temperatures]
        except httpx.TransportError as error:
            raise BenchError(f"No server answers at {url} ({error}); start one, or leave out --url.") from None
    else:
        loaded = load(settings)
        prompts = [encode(loaded, prompt) for prompt in plan.prompts]
        with server(flags) as own, Progress() as progress:
            task = progress.add_task("serving", total=len(plan.temperatures) * plan.repeats)
            for temperature in plan.temperatures:
                rates, ratios, runs = [], [], []
                for repeat in range(plan.repeats + 1):
                    started = time.perf_counter()
                    answers = [answer(loaded, settings, plan.drafters[0], p, temperature, plan) for p in prompts]
                    rate = sum(len(a.tokens) for a in answers) / (time.perf_counter() - started)
                    row = served(own, plan, temperature)
                    if repeat:  # the first round warms up
                        rates.append(rate)
                        ratios.append(row["tokens_per_second"] / rate)
                        runs.append(row)
                        progress.advance(task)
                row = {name: statistics.median(r[name] for r in runs) for name in runs[0]}
                row["in_process_tokens_per_second"] = round(statistics.median(rates), 2)
                row["served_over_in_process"] = round(statistics.median(ratios), 4)
                figures.append(row)
    show(figures)
    whole = {
        "model": settings.model.served_name,
        "drafter": plan.drafters[0],
        "max_tokens": plan.max_tokens,
        "results": figures,
    }
    if out:
        report.save(out, whole)
    return whole


def served(url: str, plan: Plan, temperature: float) -> dict[str, float]:
    """All prompts once, one after the other, with /health asked meanwhile and, for comparison, streams without it."""
    with httpx.Client(base_url=url, timeout=120) as client:
        model = client.get("/v1/models").json()["data"][0]["id"]

        def fields(prompt: str) -> dict[str, Any]:
            asked = {"model": model, "prompt": prompt, "max_tokens": plan.max_tokens, "temperature": temperature}
            options = {"stream": True, "stream_options": {"include_usage": True}, "seed": plan.seed}
            return {**asked, **options, "speculation": {"drafter": plan.drafters[0]}}

        seen, watched = Seen(), Seen()
        for prompt in plan.prompts:
            stream(client, fields(prompt), seen)
        with health(url) as answers:
            for prompt in plan.prompts:
                stream(client, fields(prompt), watched)
    quantiles = statistics.quantiles(answers, n=100)
    return {
        "temperature": temperature,
        "tokens_per_second": round(seen.tokens_per_second, 2),
        "first_token_ms_p50": round(1e3 * statistics.median(seen.first_token), 3),
        "between_chunks_ms_p50": round(1e3 * statistics.median(seen.between_chunks), 3),
        "health_ms_p50": round(1e3 * quantiles[49], 3),
        "health_ms_p99": round(1e3 * quantiles[98], 3),
    }


def show(figures: Sequence[dict[str, Any]]) -> None:
    """The figures as a table."""
    names = list(figures[0])
    table = Table(*(name.replace("_", " ") for name in names))
    for row in figures:
        table.add_row(*(str(row[name]) for name in names))
    Console().print(table)
