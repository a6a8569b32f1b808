"""`python -m bench.startup`: how long a server takes to start, and how much memory its processes hold.

A first start has empty caches: no compiled kernels and no measured costs. Its files are in the system's page cache, as they are
after an installation.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from bench import report
from bench.http.process import ServerProcess, find_worker, resident_mb, start, start_server
from bench.options import Out, Repeats

SERVE = ("outrider.server.cli", "serve")
DRAFTING_SECONDS = 120  # to wait for compiled kernels
QUESTION = "What is the capital of France?"


def measure(server: ServerProcess) -> dict[str, float]:
    """Seconds to /health, to /ready and to the end of an answer."""
    figures = {f"{name}_seconds": round(server.seconds_until(f"/{name}", 0.01), 2) for name in ("health", "ready")}
    return {**figures, "answer_seconds": answer(server)}


def warm_start(flags: Sequence[str]) -> dict[str, float]:
    """A warm start, and MiB of anonymous memory of both processes."""
    with start([*SERVE, *flags]) as server:
        figures = measure(server)
        worker = find_worker(server.process.pid)
        assert worker is not None
        memory = {"front_end_mb": resident_mb(server.process.pid), "worker_mb": resident_mb(worker)}
        return {**figures, **{name: round(size, 1) for name, size in memory.items()}}


def first_start(flags: Sequence[str], caches: Path) -> dict[str, float]:
    """A start with empty `caches`, and seconds until drafts come from the default drafter instead of prompt lookup."""
    flags = [*flags, "--speculation.cost_folder", str(caches / "costs")]
    with start([*SERVE, *flags], NUMBA_CACHE_DIR=str(caches / "kernels")) as server:
        figures = measure(server)
        wait_for_drafting(server)
        return {**figures, "drafting_seconds": elapsed(server)}


def answer(server: ServerProcess) -> float:
    """Asks a question; returns the seconds from the server's start to the end of its answer."""
    model = server.client.get("/v1/models").json()["data"][0]["id"]
    message = {"role": "user", "content": QUESTION}
    body = {"model": model, "messages": [message], "temperature": 0, "max_tokens": 24}
    server.client.post("/v1/chat/completions", json=body).raise_for_status()
    return elapsed(server)


def wait_for_drafting(server: ServerProcess) -> None:
    """Returns once /version says that the default drafter is ready. Raises TimeoutError after DRAFTING_SECONDS."""
    deadline = time.perf_counter() + DRAFTING_SECONDS
    while not server.client.get("/version").json().get("drafting"):
        if time.perf_counter() > deadline:
            raise TimeoutError(f"the default drafter was not ready within {DRAFTING_SECONDS} s")
        time.sleep(0.1)


def elapsed(server: ServerProcess) -> float:
    """Seconds from the server's start."""
    return round(time.perf_counter() - server.started, 2)


def import_seconds() -> float:
    """Seconds that a new process takes to import torch and a model class of transformers, the lower bound of a start."""
    program = "import torch; from transformers import LlamaForCausalLM"
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", program], check=True)
    return round(time.perf_counter() - started, 2)


def main(
    repeats: Repeats = 5, config: Annotated[Path, typer.Option()] = Path("configs/embedded.yaml"), out: Out = None
) -> None:
    """Starts the server first with empty caches, then several times warm, in turns with the imports alone; prints medians."""
    flags, runs = ["--config", str(config)], list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as caches:
        first = first_start(flags, Path(caches))
    with start_server(flags) as server:
        wait_for_drafting(server)  # so that the next starts find compiled kernels
    for _ in range(repeats):
        runs.append({"import_seconds": import_seconds(), **warm_start(flags)})
    medians = {name: round(statistics.median(run[name] for run in runs), 2) for name in runs[0]}
    for title, figures in (("first start", first), ("warm start", medians)):
        print(title)
        for name, value in figures.items():
            print(f"  {name.replace('_', ' '):<16} {value:>8.2f}")
    if out:
        report.save(out, {"config": str(config), "first": first, "medians": medians, "runs": runs})


if __name__ == "__main__":
    typer.run(main)
