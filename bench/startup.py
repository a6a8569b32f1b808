"""`python -m bench.startup`: how long a server takes to start, and how much memory its processes hold."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from bench import report
from bench.http.process import find_worker, resident_mb, served_url
from bench.options import Out, Repeats


def start(flags: list[str]) -> dict[str, float]:
    """Starts a server once: seconds to /health and /ready, MiB of anonymous memory of both processes."""
    command = [sys.executable, "-m", "outrider.server.cli", "serve", "--port", "0", *flags]
    started = time.perf_counter()
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        url = served_url(process.stderr)
        health, ready = (seconds_until(f"{url}/{name}", started) for name in ("health", "ready"))
        worker = find_worker(process.pid)
        assert worker is not None
        return {
            "health_seconds": round(health, 2),
            "ready_seconds": round(ready, 2),
            "front_end_mb": round(resident_mb(process.pid), 1),
            "worker_mb": round(resident_mb(worker), 1),
        }
    finally:
        process.terminate()
        process.communicate()


def seconds_until(url: str, started: float) -> float:
    """Seconds from `started` until the URL answers with status 200."""
    while httpx.get(url).status_code != 200:
        time.sleep(0.01)
    return time.perf_counter() - started


def import_seconds() -> float:
    """Seconds that a new process takes to import torch and a model class of transformers, the lower bound of a start."""
    program = "import torch; from transformers import LlamaForCausalLM"
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", program], check=True)
    return round(time.perf_counter() - started, 2)


def main(
    repeats: Repeats = 5, config: Annotated[Path, typer.Option()] = Path("configs/embedded.yaml"), out: Out = None
) -> None:
    """Starts the server several times, in turns with the imports alone; prints medians."""
    runs: list[dict[str, Any]] = []
    for _ in range(repeats):
        runs.append({"import_seconds": import_seconds(), **start(["--config", str(config)])})
    figures = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    for name, value in figures.items():
        print(f"{name.replace('_', ' '):<16} {value:>8.2f}")
    if out:
        report.save(out, {"medians": figures, "runs": runs})


if __name__ == "__main__":
    typer.run(main)
