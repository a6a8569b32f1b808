"""`outrider bench serve`: what a client sees of a server, beside the same answers in process.

Starts a server of its own unless it is given the address of one; only its own is compared with in-process decoding, answer by
answer in turns: both need the machine, and its speed changes from second to second. While streams run once more, /health is
asked all the time: the front end must stay responsive.
"""

from __future__ import annotations

import itertools
import re
import statistics
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench import report
from bench.decode import BenchError, Plan, begin, encode
from server.settings import Settings
from server.worker.runtime import load

HEALTH_PAUSE_SECONDS = 0.01
START_SECONDS = 300


@dataclass(frozen=True)
class Seen:
    """What a client saw of one streamed answer, in seconds."""

    tokens: int
    seconds: float  # of the whole request
    first_token: float
    between_chunks: list[float]

    @property
    def tokens_per_second(self) -> float:
        """Over the whole request, reading the prompt included."""
        return self.tokens / self.seconds


def stream(client: httpx.Client, fields: dict[str, Any]) -> Seen:
    """One streamed completion, timed, and read once it has ended. Raises BenchError where the server refuses."""
    started = time.perf_counter()
    body, arrivals = bytearray(), [started]
    with client.stream("POST", "/v1/completions", json=fields) as response:
        for chunk in response.iter_raw():
            arrivals.append(time.perf_counter())
            body += chunk
    if response.status_code != 200:
        raise BenchError(f"The server answered {response.status_code}: {body.decode()[:200]}")
    lines = [line.removeprefix(b"data: ") for line in body.splitlines() if line.startswith(b"data: {")]
    tokens = msgspec.json.decode(lines[-1])["usage"]["completion_tokens"]
    gaps = [b - a for a, b in itertools.pairwise(arrivals)]
    return Seen(tokens, arrivals[-1] - started, gaps[0], gaps[1:])


@dataclass(frozen=True)
class Own:
    """A server process of our own."""

    url: str
    process: subprocess.Popen[str]
    log: deque[str]  # the last lines that it wrote


@contextmanager
def server(flags: Sequence[str]) -> Iterator[Own]:
    """A server process of our own, ready."""
    command = [sys.executable, "-m", "server.cli", "serve", "--port", "0", *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        line = process.stderr.readline()
        found = re.search(r"http://\S+(?=/v1)", line)
        if not found:
            raise BenchError(f"The server did not start: {line.strip()}")
        log: deque[str] = deque(maxlen=10_000)
        threading.Thread(target=log.extend, args=(process.stderr,), daemon=True).start()  # a full pipe stops a server
        deadline = time.monotonic() + START_SECONDS
        while httpx.get(f"{found[0]}/ready").status_code != 200:
            if time.monotonic() > deadline or process.poll() is not None:
                raise BenchError("The server did not get ready.")
            time.sleep(0.2)
        yield Own(found[0], process, log)
    finally:
        process.terminate()
        process.wait(60)


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
    if url:
        try:
            figures = [served(url, plan, temperature, None) for temperature in plan.temperatures]
        except httpx.TransportError as error:
            raise BenchError(f"No server answers at {url} ({error}); start one, or leave out --url.") from None
    else:
        inside = InProcess(settings, plan)
        with server(flags) as own:
            figures = [served(own.url, plan, temperature, inside) for temperature in plan.temperatures]
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


class InProcess:
    """The same answers without a server."""

    def __init__(self, settings: Settings, plan: Plan) -> None:
        self._settings = settings
        self._plan = plan
        self._loaded = load(settings)

    def answer(self, prompt: str, temperature: float) -> Seen:
        """One answer, reading and tokenizing the prompt included."""
        started = time.perf_counter()
        ids = encode(self._loaded, prompt)
        generation = begin(self._loaded, self._settings, self._plan.drafters[0], ids, temperature, self._plan)
        arrivals, tokens = [started], 0
        while True:
            step = generation.step()
            tokens += len(step.tokens)
            if step.tree is not None:
                arrivals.append(time.perf_counter())
            if step.finish is not None:
                break
        generation.close()
        gaps = [b - a for a, b in itertools.pairwise(arrivals)]
        return Seen(tokens, arrivals[-1] - started, gaps[0], gaps[1:])


def served(url: str, plan: Plan, temperature: float, inside: InProcess | None) -> dict[str, float]:
    """All prompts, each answer beside one in process right before it; then again with /health asked all the time."""
    with httpx.Client(base_url=url, timeout=120) as client, Progress() as progress:
        model = client.get("/v1/models").json()["data"][0]["id"]
        task = progress.add_task(f"serving at {temperature}", total=(plan.repeats + 1) * len(plan.prompts))

        def ask(prompt: str) -> Seen:
            asked = {"model": model, "prompt": prompt, "max_tokens": plan.max_tokens, "temperature": temperature}
            options = {"stream": True, "stream_options": {"include_usage": True}, "seed": plan.seed}
            return stream(client, {**asked, **options, "speculation": {"drafter": plan.drafters[0]}})

        seen: list[Seen] = []
        compared: list[Seen] = []
        for repeat in range(plan.repeats + 1):
            for prompt in plan.prompts:
                inner = [inside.answer(prompt, temperature)] if inside else []
                answered = ask(prompt)
                if repeat:  # the first round warms up
                    seen.append(answered)
                    compared += inner
                progress.advance(task)
        with health(url) as answers:
            for prompt in plan.prompts:
                ask(prompt)
    quantiles = statistics.quantiles(answers, n=100)
    row = {
        "temperature": temperature,
        "tokens_per_second": round(statistics.median(s.tokens_per_second for s in seen), 2),
        "first_token_ms_p50": round(1e3 * statistics.median(s.first_token for s in seen), 3),
        "between_chunks_ms_p50": round(1e3 * statistics.median(gap for s in seen for gap in s.between_chunks), 3),
        "health_ms_p50": round(1e3 * quantiles[49], 3),
        "health_ms_p99": round(1e3 * quantiles[98], 3),
    }
    if inside:
        pairs = list(zip(seen, compared, strict=True))
        row["in_process_tokens_per_second"] = round(statistics.median(c.tokens_per_second for c in compared), 2)
        row["served_over_in_process"] = round(statistics.median(s.tokens_per_second / c.tokens_per_second for s, c in pairs), 4)
        row["first_token_ms_over_in_process"] = round(
            1e3 * statistics.median(s.first_token - c.first_token for s, c in pairs), 3
        )
    return row


def show(figures: Sequence[dict[str, Any]]) -> None:
    """The figures as a table."""
    names = list(figures[0])
    table = Table(*(name.replace("_", " ") for name in names))
    for row in figures:
        table.add_row(*(str(row[name]) for name in names))
    Console().print(table)
