"""`outrider bench files`: forwards of GGUF files by the compiled library, beside llama.cpp's, in turns."""

from __future__ import annotations

import json
import statistics
import subprocess
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import track

from bench import report
from bench.plan import BenchError
from outrider.verify.measurement import any_tokens
from outrider.verify.model import backend
from outrider.verify.model.batch import ForwardBatch
from outrider.verify.model.load_options import LoadOptions
from outrider.verify.model.runner import ModelRunner

# Steps are timed after this many tokens, this many times for each number of rows.
CONTEXT = 128
STEPS = {1: 60, 8: 20}
PROMPT, CHUNK = 2048, 512
GENERATED = 64
ROWS = {1: "one row, ms", 8: "eight rows, ms"}
SPEED = "prompt of 2,048, tokens/s"


def run(files: Sequence[Path], program: Path, threads: int, turns: int, out: Path | None) -> None:
    """Measures, prints, and saves the figures if `out` is given. `program` is llama-bench. Raises BenchError."""
    for path in (*files, program, batched(program)):
        if not path.is_file():
            raise BenchError(f"there is no file {path}")
    found: dict[str, Any] = {}
    for file in track(files, "Files"):
        runs = [(of_library(file, threads), of_llama(file, program, threads)) for _ in range(turns)]
        ours, theirs = ({name: median(run[i][name] for run in runs) for name in (*ROWS.values(), SPEED)} for i in (0, 1))
        shares = {name: round(ours[name] / theirs[name], 2) for name in ours}
        found[file.name] = {"outrider": ours, "llama.cpp": theirs, "outrider over llama.cpp": shares}
        if out:
            report.save(out, {"threads": threads, "turns": turns, "files": found})
    rows = [[Path(name).stem, *each["outrider over llama.cpp"].values()] for name, each in found.items()]
    legend = "Times of steps of one and of eight rows: less is faster. Tokens per second of a prompt: more is."
    report.print_table("Medians over those of llama.cpp", ("file", "row", "8 rows", "prompt"), rows, legend)


def of_library(file: Path, threads: int) -> dict[str, float]:
    """Milliseconds of steps of random tokens, and the speed of a prompt."""
    runner = backend.load(LoadOptions(str(file), device="cpu"))
    runner.use_threads(threads)
    runner.start(PROMPT)
    steps = {name: median(timed_steps(runner, rows)) for rows, name in ROWS.items()}
    return {**steps, SPEED: PROMPT / prompt_seconds(runner)}


def timed_steps(runner: ModelRunner, rows: int) -> list[float]:
    """Milliseconds of steps over `rows` rows of random tokens. In a mixture, equal ones would all use the same experts."""
    cache = runner.new_cache()
    read(runner, cache, any_tokens(CONTEXT, runner.vocabulary))
    random, times = np.random.default_rng(rows), list[float]()
    for _ in range(STEPS[rows]):
        batch = ForwardBatch.chain(random.integers(runner.vocabulary, size=rows))
        started = time.perf_counter()
        runner.forward(cache, batch)
        times.append(1e3 * (time.perf_counter() - started))
    return times


def prompt_seconds(runner: ModelRunner) -> float:
    """Seconds of reading a prompt in chunks."""
    cache, tokens = runner.new_cache(), any_tokens(PROMPT, runner.vocabulary)
    started = time.perf_counter()
    for first in range(0, PROMPT, CHUNK):
        read(runner, cache, tokens[first : first + CHUNK])
    return time.perf_counter() - started


def read(runner: ModelRunner, cache: Any, tokens: Any) -> None:
    """Reads tokens into a cache."""
    runner.forward(cache, ForwardBatch.chain(tokens), logits=False)
    cache.commit(list(range(len(tokens))))


def of_llama(file: Path, program: Path, threads: int) -> dict[str, float]:
    """The same by llama.cpp. Its step of eight rows continues eight texts, because a prompt gets the logits of one row."""
    threaded = ("-m", str(file), "-t", str(threads))
    rows = started(program, *threaded, "-p", str(PROMPT), "-n", str(GENERATED), "-r", "1", "-o", "jsonl")
    speeds = {each["n_prompt"]: each["avg_ts"] for each in rows}
    sizes = ("-c", str(PROMPT), "-npp", str(CONTEXT), "-ntg", str(STEPS[8]), "-npl", "8")
    (eight,) = started(batched(program), *threaded, *sizes, "--output-format", "jsonl")
    return {ROWS[1]: 1e3 / speeds[0], ROWS[8]: 8e3 / eight["speed_tg"], SPEED: speeds[PROMPT]}


def batched(program: Path) -> Path:
    """The program beside llama-bench that continues several texts at once."""
    return program.with_name("llama-batched-bench")


def started(program: Path, *arguments: str) -> list[dict[str, Any]]:
    """The lines of JSON that a program prints. Raises BenchError."""
    ended = subprocess.run([str(program), *arguments], capture_output=True, text=True)
    if ended.returncode:
        raise BenchError(f"{program.name} failed: {ended.stderr.strip().splitlines()[-1]}")
    return [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]


def median(values: Iterable[float]) -> float:
    """The median, with two decimals."""
    return round(statistics.median(values), 2)
