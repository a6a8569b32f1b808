"""`outrider bench gpu`: checks and measures everything that needs a GPU, in minutes.

Each part is saved as soon as it is done, so an interrupted run keeps its finished parts. What concerns several streams,
invariant rows and pages is in `bench.model.gpu_streams`.
"""

from __future__ import annotations

import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from bench import report
from bench.model import gpu_kernels, gpu_streams
from bench.model.bandwidth import read_bytes_per_second
from bench.plan import PROMPTS, BenchError, Plan, read_prompts
from outrider.server.settings import Settings
from outrider.verify.model.invariance import MAX_COST
from outrider.verify.model.load_options import Compile

TESTS = (
    "tests/verify/model/gpu/test_triton_attention.py",
    "tests/verify/model/gpu/test_triton_products.py",
    "tests/verify/model/gpu/test_triton_recurrence.py",
    "tests/verify/model/gpu/test_triton_sampling.py",
    "tests/verify/model/gpu/test_graphs.py",
    "tests/verify/model/gpu/test_heads.py",
    "tests/verify/model/gpu/test_paged_cache.py",
    "tests/verify/model/gpu/test_pooled_runner.py",
    "tests/verify/model/gpu/test_recurrent_runner.py",
    "tests/verify/model/gpu/test_device.py",
    "tests/verify/draft_model/test_draft_model.py",
)
SHAPE = "llama-2-7b"
KERNEL_SHAPE = "llama-3-8b"
CONTEXT_TOKENS = 2304
EIGHT_STREAMS = 3.0  # least tokens of eight streams over one stream's, without drafts


def tests() -> dict[str, Any]:
    """Runs the tests of code that needs a GPU, in a process of their own."""
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", *TESTS], stdout=subprocess.PIPE, text=True)
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return {"passed": done.returncode == 0, "summary": done.stdout.strip().splitlines()[-1:], "failed": failed}


def steps(compile: Compile) -> Callable[[], dict[str, Any]]:
    """Measures steps of SHAPE by nodes and context."""
    from bench.model.steps import run_steps

    def measured() -> dict[str, Any]:
        chosen = {"dtype": "bfloat16", "context_tokens": CONTEXT_TOKENS}
        figures = run_steps(SHAPE, Settings.model_validate({"model": chosen}), None, compile)
        torch.cuda.empty_cache()
        return figures

    return measured


def lossless() -> dict[str, Any]:
    """Compares drafted answers of the embedded model in float32 with plain decoding."""
    from bench.lossless import run

    plan = Plan(["trigram", "fusion"], read_prompts(PROMPTS, 8), [0.0, 0.8], 96, 1)
    divergences = run(Settings.model_validate({"model": {"dtype": "float32"}}), plan)
    answers = len(plan.drafters) * len(plan.prompts) * len(plan.temperatures)
    return {"answers": answers, "divergences": len(divergences), "margins": [divergence.margin for divergence in divergences]}


def memory() -> dict[str, Any]:
    """The number of memory segments that torch has allocated after each of several equal answers."""
    from bench.decode import answer, encode
    from outrider.server.worker.runtime import load

    settings = Settings()
    runtime = load(settings)
    plan = Plan(["fusion"], read_prompts(PROMPTS, 1), [0.8], 256, 1)
    prompt = encode(runtime, plan.prompts[0])
    segments = []
    for _ in range(4):
        answer(runtime, settings, "fusion", prompt, 0.8, plan)
        segments.append(torch.cuda.memory_stats()["segment.all.allocated"])
    speed = read_bytes_per_second(runtime.runner)
    return {"segments_allocated_after_answers": segments, "read_gb_per_second": round(speed / 1e9, 1)}


def claims(figures: dict[str, Any]) -> dict[str, bool]:
    """Whether the figures support each claim about a GPU; claims of parts that failed or did not run are left out."""
    results: dict[str, bool] = {}
    done = {name: part for name, part in figures.items() if "error" not in part}
    if "lossless" in done:
        results["drafted answers are plain decoding's"] = done["lossless"]["divergences"] == 0
    if "memory" in done:
        results["steps take no memory"] = len(set(done["memory"]["segments_allocated_after_answers"][1:])) == 1
    if "tests" in done:
        results["the tests pass"] = done["tests"]["passed"]
    if "steps" in done:
        share = done["steps"]["single_token_step_share_of_bandwidth"]
        results["a single-token step reads at 80 % of the memory's speed"] = share >= 0.8
        results["64 rows cost 1.25 times one at most"] = done["steps"]["nodes_over_single"]["63"] <= 1.25
    if "streams" in done:
        share = done["streams"]["tokens_over_one_stream"]["8"]
        results["eight streams have three times the tokens of one"] = share >= EIGHT_STREAMS
    if "invariance" in done:
        found = done["invariance"]
        results["rows are invariant for 5 % of a step at most"] = found["holds"] and found["cost"] <= MAX_COST
    if "pages" in done:
        results["joining and leaving takes no memory and loses no page"] = done["pages"]["steady"]
    return results


def measure_parts(parts: dict[str, Callable[[], dict[str, Any]]], out: Path) -> dict[str, bool]:
    """Runs all parts and saves the figures after each; a part that raises is saved with its error. Returns the claims."""
    run_started = time.perf_counter()
    console = Console()
    figures: dict[str, Any] = {}
    results: dict[str, bool] = {}
    for name, part in parts.items():
        started = time.perf_counter()
        try:
            figures[name] = part()
        except Exception as error:  # the other parts must still run
            figures[name] = {"error": f"{type(error).__name__}: {error}"[:500], "where": traceback.format_exc()[-2000:]}
        figures[name]["seconds"] = round(time.perf_counter() - started, 1)
        console.print(name, figures[name])
        results = claims(figures)
        report.save(out, figures | {"claims": results, "seconds": round(time.perf_counter() - run_started, 1)})
    return results


def check_device() -> None:
    """Raises BenchError without a GPU."""
    if not torch.cuda.is_available():
        raise BenchError("torch finds no GPU; run bench gpu on a machine that has one.")


def chosen_parts(only: str) -> dict[str, Callable[[], dict[str, Any]]]:
    """The parts to measure: those in `only`, or all. Raises BenchError."""
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "lossless": lossless,
        "memory": memory,
        "pages": gpu_streams.pages,
        "steps": steps("on"),
        "streams": partial(gpu_streams.together, SHAPE, CONTEXT_TOKENS),
        "invariance": partial(gpu_streams.invariant, SHAPE, CONTEXT_TOKENS),
        "kernels": partial(gpu_kernels.kernels_of_steps, KERNEL_SHAPE),
        "steps_without_compile": steps("off"),
        "tests": tests,
    }
    if unknown := {*only.split(",")} - {*parts, ""}:
        raise BenchError(f"There is no part {sorted(unknown)[0]}; name some of {', '.join(parts)}.")
    return {name: part for name, part in parts.items() if not only or name in only.split(",")}


def run(parts: dict[str, Callable[[], dict[str, Any]]], out: Path) -> None:
    """Measures, saves and prints."""
    results = measure_parts(parts, out)
    report.print_table("Claims", ("claim", "holds"), [(claim, "yes" if holds else "NO") for claim, holds in results.items()])
