"""`outrider bench serve`: client-side speed of a server, compared with the same answers decoded in process.

Starts a server unless `--url` is given. Only its own server is compared with in-process decoding, answer by answer in turns,
because the machine's speed changes over time. A last round of streams runs while /health is polled: the front end must stay
responsive.
"""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
from rich.progress import Progress

from bench import report
from bench.decode import begin, encode
from bench.http.process import start_server
from bench.plan import BenchError, Plan
from outrider.server.settings import Settings
from outrider.server.worker.runtime import load
from outrider.verify.decode import step

HEALTH_PAUSE_SECONDS = 0.01
TIMEOUT_SECONDS = 120
FIGURES = {  # name to printed label
    "tokens_per_second": "tokens/s over the whole request",
    "first_token_ms_p50": "first token, p50 (ms)",
    "between_chunks_ms_p50": "between chunks, p50 (ms)",
    "health_ms_p50": "/health under streaming, p50 (ms)",
    "health_ms_p99": "/health under streaming, p99 (ms)",
    "in_process_tokens_per_second": "tokens/s in process",
    "served_over_in_process": "tokens/s, served over in process",
    "first_token_ms_over_in_process": "first token, served minus in process (ms)",
}


@dataclass(frozen=True)
class Timing:
    """Times of one streamed answer, in seconds."""

    tokens: int
    seconds: float  # of the whole request
    first_token: float
    between_chunks: list[float]

    @property
    def tokens_per_second(self) -> float:
        """Over the whole request, prefill included."""
        return self.tokens / self.seconds


def make_timing(tokens: int, arrivals: Sequence[float]) -> Timing:
    """The timing of an answer whose request started at `arrivals[0]` and whose chunks arrived at the other times."""
    gaps = [b - a for a, b in itertools.pairwise(arrivals)]
    return Timing(tokens, arrivals[-1] - arrivals[0], gaps[0], gaps[1:])


def stream(client: httpx.Client, fields: dict[str, Any]) -> Timing:
    """Sends a streaming completion request; parses it after its end. Raises BenchError if the server refuses it."""
    body, arrivals = bytearray(), [time.perf_counter()]
    with client.stream("POST", "/v1/completions", json=fields) as response:
        for chunk in response.iter_raw():
            arrivals.append(time.perf_counter())
            body += chunk
    if response.status_code != 200:
        raise BenchError(f"The server answered {response.status_code}: {body.decode()[:200]}")
    lines = [line.removeprefix(b"data: ") for line in body.splitlines() if line.startswith(b"data: {")]
    return make_timing(msgspec.json.decode(lines[-1])["usage"]["completion_tokens"], arrivals)


@contextmanager
def poll_health(url: str) -> Iterator[list[float]]:
    """Polls /health in a thread; yields the list that it fills with seconds per request."""
    seconds: list[float] = []
    done = threading.Event()

    def poll() -> None:
        with httpx.Client(base_url=url) as client:
            while not done.wait(HEALTH_PAUSE_SECONDS):
                started = time.perf_counter()
                client.get("/health")
                seconds.append(time.perf_counter() - started)

    thread = threading.Thread(target=poll)
    thread.start()
    try:
        yield seconds
    finally:
        done.set()
        thread.join()


def run(settings: Settings, flags: Sequence[str], plan: Plan, url: str | None, out: Path | None) -> dict[str, Any]:
    """Measures, prints, and saves the figures if `out` is given. Raises BenchError."""
    if url:
        try:
            rows = [measure(url, plan, temperature, None) for temperature in plan.temperatures]
        except httpx.TransportError as error:
            raise BenchError(f"No server answers at {url} ({error}); start one, or leave out --url.") from None
    else:
        in_process = InProcess(settings, plan)
        with start_server([*flags, "--model.generation_config", "none"]) as server:  # in process, there are no defaults either
            rows = [measure(server.url, plan, temperature, in_process) for temperature in plan.temperatures]
    show(rows)
    figures = {
        "model": settings.model.served_name,
        "drafter": plan.drafters[0],
        "max_tokens": plan.max_tokens,
        "results": rows,
    }
    if out:
        report.save(out, figures)
    return figures


class InProcess:
    """Decodes the same answers without a server."""

    def __init__(self, settings: Settings, plan: Plan) -> None:
        self._settings = settings
        self._plan = plan
        self._runtime = load(settings)

    def answer(self, prompt: str, temperature: float) -> Timing:
        """Decodes one answer; tokenizing the prompt and prefill are included."""
        arrivals, tokens = [time.perf_counter()], 0
        ids = encode(self._runtime, prompt)
        generation = begin(self._runtime, self._settings, self._plan.drafters[0], ids, temperature, self._plan)
        while True:
            taken = step(generation)
            tokens += len(taken.tokens)
            if taken.tree is not None:
                arrivals.append(time.perf_counter())
            if taken.finish is not None:
                break
        generation.close()
        return make_timing(tokens, arrivals)


def measure(url: str, plan: Plan, temperature: float, in_process: InProcess | None) -> dict[str, float]:
    """Streams all prompts, each right after the same answer in process; then again while /health is polled."""
    with httpx.Client(base_url=url, timeout=TIMEOUT_SECONDS) as client, Progress() as progress:
        model = client.get("/v1/models").json()["data"][0]["id"]
        task = progress.add_task(f"serving at {temperature}", total=(plan.repeats + 1) * len(plan.prompts))
        served: list[Timing] = []
        compared: list[Timing] = []
        for repeat in range(plan.repeats + 1):
            for prompt in plan.prompts:
                in_process_timings = [in_process.answer(prompt, temperature)] if in_process else []
                timing = stream(client, request_fields(model, prompt, temperature, plan))
                if repeat:  # the first round warms up
                    served.append(timing)
                    compared += in_process_timings
                progress.advance(task)
        with poll_health(url) as health:
            for prompt in plan.prompts:
                stream(client, request_fields(model, prompt, temperature, plan))
    return {"temperature": temperature, **summarize(served, health), **compare(served, compared)}


def request_fields(model: str, prompt: str, temperature: float, plan: Plan) -> dict[str, Any]:
    """The body of a streaming completion request."""
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": plan.max_tokens,
        "temperature": temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
        "seed": plan.seed,
        "speculation": {"drafter": plan.drafters[0]},
    }


def summarize(served: Sequence[Timing], health: Sequence[float]) -> dict[str, float]:
    """Medians of the streams, and quantiles of the seconds that /health took."""
    quantiles = statistics.quantiles(health, n=100)
    return {
        "tokens_per_second": round(statistics.median(timing.tokens_per_second for timing in served), 2),
        "first_token_ms_p50": round(1e3 * statistics.median(timing.first_token for timing in served), 3),
        "between_chunks_ms_p50": round(1e3 * statistics.median(gap for timing in served for gap in timing.between_chunks), 3),
        "health_ms_p50": round(1e3 * quantiles[49], 3),
        "health_ms_p99": round(1e3 * quantiles[98], 3),
    }


def compare(served: Sequence[Timing], compared: Sequence[Timing]) -> dict[str, float]:
    """Medians over pairs of a served answer and the same one in process; nothing without such pairs."""
    if not compared:
        return {}
    pairs = list(zip(served, compared, strict=True))
    ratio = statistics.median(s.tokens_per_second / c.tokens_per_second for s, c in pairs)
    delay = statistics.median(s.first_token - c.first_token for s, c in pairs)
    return {
        "in_process_tokens_per_second": round(statistics.median(timing.tokens_per_second for timing in compared), 2),
        "served_over_in_process": round(ratio, 4),
        "first_token_ms_over_in_process": round(1e3 * delay, 3),
    }


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Prints the figures, a column per temperature."""
    report.print_table(
        "Client-side speed, by temperature",
        ("figure", *(str(row["temperature"]) for row in rows)),
        [(label, *(row[name] for row in rows)) for name, label in FIGURES.items() if name in rows[0]],
        "Medians of all prompts and repeats; served and in process are compared answer by answer.",
    )
