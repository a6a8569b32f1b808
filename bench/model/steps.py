"""`outrider bench decode --shape`: the cost of a step of a known shape, beside its linear layers and the read bandwidth."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import torch

from bench import report
from bench.model.bandwidth import linear_pass, peak_memory_mb, read_bytes_per_second
from bench.model.shapes import check_shape, random_runner
from outrider.drafters.interface import MAX_NODES
from outrider.server.settings import Settings
from outrider.server.worker.runtime import default_threads
from outrider.verify.cost import CostCurve
from outrider.verify.measurement import CONTEXTS, measure, timed_forward
from outrider.verify.model.load_options import Compile, Quantization
from outrider.verify.model.loading import resolve_devices
from outrider.verify.model.torch_runner import TorchRunner

STEP_NODES = (0, 1, 2, 4, 8, 16, 32, 63, 64, MAX_NODES)
ROUNDS = 25
SUMMARY = {  # printed as a list; the other figures are printed as a matrix
    "shape": "shape",
    "dtype": "dtype",
    "weight_bits": "bits per weight",
    "kv_dtype": "keys and values",
    "device": "device",
    "threads": "threads",
    "weights_mb": "weights (MB)",
    "peak_memory_mb": "peak memory (MB)",
    "measured_read_gb_per_second": "measured read bandwidth (GB/s)",
    "linear_layers_ms": "linear layers alone, one token (ms)",
    "single_token_step_ms": "step of one token (ms)",
    "single_token_step_over_linear_layers": "step of one token, over linear layers alone",
    "single_token_step_share_of_bandwidth": "step of one token, share of read bandwidth",
}


def make_runner(shape: str, settings: Settings, compile: Compile = "auto") -> TorchRunner:
    """Random weights of `shape`, with dtype (auto: bfloat16), device and threads of the settings. Raises BenchError."""
    check_shape(shape)
    chosen = settings.model
    dtype = torch.bfloat16 if chosen.dtype == "auto" else getattr(torch, chosen.dtype)
    how = (chosen.backend != "torch", compile, Quantization(chosen.quantize), chosen.kv_dtype)
    runner = random_runner(shape, dtype, chosen.device, chosen.context_tokens, *how)
    runner.threads = chosen.threads or default_threads(runner)
    torch.set_num_threads(runner.threads)
    runner.start(runner.context_tokens)
    if runner.is_invariant:  # as in `outrider.verify.model.loading.start_model`
        torch.set_num_threads(1)
    return runner


def node_budget(runner: TorchRunner, settings: Settings) -> tuple[int, CostCurve | None]:
    """The most draft nodes of a step, and the measured costs that choose their number with `speculation.max_nodes: auto`."""
    nodes = settings.speculation.max_nodes
    return (MAX_NODES, measure(runner)) if nodes == "auto" else (nodes, None)


def run_steps(shape: str, settings: Settings, out: Path | None, compile: Compile = "auto") -> dict[str, Any]:
    """Measures, prints, and saves the figures if `out` is given. Raises BenchError."""
    runner = make_runner(shape, settings, compile)
    curve, rounds = measure(runner, STEP_NODES), short_rounds(runner)
    bandwidth, weight_bytes = read_bytes_per_second(runner), runner.weight_bytes
    single = statistics.median(steps[0] for _, steps in rounds)
    figures = {
        "shape": shape,
        "dtype": str(runner.cache_shape.dtype),
        "weight_bits": runner.weight_bits,
        "kv_dtype": str(runner.cache_shape.stored_dtype),
        "device": ", ".join(map(str, resolve_devices(settings.model.device))),
        "threads": runner.threads,
        "weights_mb": round(weight_bytes / 1e6, 1),
        "measured_read_gb_per_second": round(bandwidth / 1e9, 2),
        "linear_layers_ms": round(1e3 * statistics.median(linear for linear, _ in rounds), 3),
        "single_token_step_ms": round(1e3 * single, 3),
        "single_token_step_over_linear_layers": round(statistics.median(steps[0] / linear for linear, steps in rounds), 3),
        "single_token_step_share_of_bandwidth": round(weight_bytes / single / bandwidth, 3),
        "step_ms": {
            str(context): {str(nodes): round(1e3 * seconds, 3) for nodes, seconds in zip(curve.nodes, row, strict=True)}
            for context, row in zip(curve.contexts, curve.seconds, strict=True)
        },
        "nodes_over_single": {
            str(nodes): round(statistics.median(steps[index] / steps[0] for _, steps in rounds), 3)
            for index, nodes in enumerate(STEP_NODES)
        },
        "peak_memory_mb": peak_memory_mb(),
    }
    show(figures)
    if out:
        report.save(out, figures)
    return figures


def short_rounds(runner: TorchRunner) -> list[tuple[float, list[float]]]:
    """Seconds of the linear layers alone and of a step of each size from a short context on, measured in turns."""
    cache, linear = runner.new_cache(), linear_pass(runner)
    cache.fill(CONTEXTS[0])

    def step(nodes: int) -> float:
        seconds = timed_forward(runner, cache, nodes)
        cache.commit([0])  # recurrent layers take the token into their states in the next forward
        return seconds

    rounds = [(linear(), [step(nodes) for nodes in STEP_NODES]) for _ in range(ROUNDS + 1)]
    return rounds[1:]  # the first one warms up


def show(figures: dict[str, Any]) -> None:
    """Prints a summary, and milliseconds of a step by draft nodes and context."""
    report.print_table("Summary", ("figure", "value"), [(label, figures[name]) for name, label in SUMMARY.items()])
    contexts = list(figures["step_ms"])
    report.print_table(
        "Milliseconds of a step that verifies N draft nodes, by context in tokens",
        ("N", *contexts, "over\nN = 0"),
        [
            (nodes, *(f"{figures['step_ms'][context][nodes]:.3f}" for context in contexts), f"{ratio:.3f}")
            for nodes, ratio in figures["nodes_over_single"].items()
        ],
        f"over N = 0: forwards alone from a context of {CONTEXTS[0]} tokens on; the other columns are whole steps.",
    )
