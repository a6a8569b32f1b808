"""`python -m bench.roofline`: predicts the steps of GPUs from the bytes and launches that are counted without one.

docs/roofline.md shows the predictions, says where each assumption comes from, and compares them with what a GPU
took. Nothing here is a measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from transformers import Qwen3_5TextConfig

from bench import report
from bench.model.counts import PARTS, Counts
from bench.model.shapes import SHAPES

RESULT = report.RESULTS / "roofline.json"
CONTEXT = 4096
# Of the larger steps. With 63 nodes and the root, a forward has 64 rows; with 64, the next captured number, 72.
NODES = (63, 64)


class Model(NamedTuple):
    """A model whose steps are predicted."""

    config: Callable[[], Any]
    layers: int
    weights_gb: float  # in memory, with the embedding table
    bits: float = 16.0  # of a weight, scales included
    context: int = CONTEXT
    nodes: tuple[int, ...] = NODES  # of the larger steps


MODELS = {
    "Llama-3.1-8B": Model(SHAPES["llama-3-8b"], 32, 16.1),
    "Qwen3-30B-A3B": Model(SHAPES["qwen3-30b-a3b"], 48, 61.1),
    "Llama-3.1-8B, 4 bits": Model(SHAPES["llama-3-8b"], 32, 6.0, 5.25),  # the layer of logits has 8
    "Qwen3-30B-A3B, 4 bits": Model(SHAPES["qwen3-30b-a3b"], 48, 19.8, 5.05),
    "Qwen3.5-9B": Model(Qwen3_5TextConfig, 32, 17.9),  # transformers' default sizes
}


class GPU(NamedTuple):
    """Figures of a data sheet."""

    bytes_per_second: float
    flops: float  # dense products of bfloat16, summed in float32
    memory_gb: float
    overlaps: bool  # a kernel may start before its predecessor has ended: compute capability 9.0 and later


GPUS = {
    "H100 SXM": GPU(3.35e12, 989e12, 80, True),
    "H200": GPU(4.8e12, 989e12, 141, True),
    "RTX 4090": GPU(1.008e12, 165e12, 24, False),
    "L4": GPU(0.3e12, 121e12, 24, False),
}


@dataclass(frozen=True)
class Assumptions:
    """Assumptions about everything that is not counted, with their sources. "Measured" is on an H200."""

    readable: float = 0.90  # of the data sheet's bandwidth: what a sum over a large tensor reads; measured
    kernel: float = 0.86  # of the readable bandwidth: gpt-fast's published step of Llama-2-7B; products of one row reach 0.90
    # Products of 64 and of 72 rows over those of one row, with the rows that are read and the parts that are written; measured.
    rows_64: float = 1.16
    rows_72: float = 1.20
    cached: float = 0.5  # of what one kernel writes and the next one reads: the cache has it until then
    launch_seconds: float = 0.96e-6  # a small kernel of a graph, and where kernels overlap; both measured
    overlapped_seconds: float = 0.68e-6
    packing_seconds: float = 0.1e-3  # the inputs of a forward, on the host; launching 429 kernels was measured at 0.5 ms
    host_seconds: float = 0.1e-3  # commit, text and messages, on the host
    draft_seconds: float = 0.2e-3  # on the host, with 64 nodes; docs/benchmarks.md

    def products(self, nodes: int) -> float:
        """The time of products with this number of nodes over that of one row's."""
        return 1.0 if not nodes else self.rows_64 if nodes < 64 else self.rows_72


ASSUMED = Assumptions()


def gpt_fast_launches(layers: int) -> int:
    """About the kernels of a step of gpt-fast.

    In a layer: norm, qkv, two rotations that write to the cache, attention, two of its parts, o, norm, gate and up with the
    activation, down. Sums are part of the norms.
    """
    return 11 * layers + 4


def predict(counts: Counts, nodes: int, readable: float, flops: float, overlaps: bool = False) -> dict[str, float]:
    """Seconds of a step by part, on a GPU that reads `readable` bytes a second."""
    assumed = ASSUMED
    speed = readable * assumed.kernel
    once = {"linear": counts.weight_bytes, "attention": counts.text_bytes}
    moved = {part: size - assumed.cached * (size - once.get(part, 0.0)) for part, size in counts.bytes.items()}
    seconds = {part: moved[part] / speed for part in PARTS}
    products = counts.weight_bytes / speed * assumed.products(nodes) if nodes else seconds["linear"]
    return seconds | {
        "linear": max(products, counts.flops / flops),
        "launches": sum(counts.launches.values()) * (assumed.overlapped_seconds if overlaps else assumed.launch_seconds),
        "host": assumed.packing_seconds + assumed.host_seconds + (assumed.draft_seconds if nodes else 0.0),
    }


def stored(counts: Counts, bits: float) -> Counts:
    """The counts with weights of this many bits."""
    less = counts.weight_bytes * (1.0 - bits / 16.0)
    parts = counts.bytes | {"linear": counts.bytes["linear"] - less}
    return replace(counts, bytes=parts, weight_bytes=counts.weight_bytes - less)


def prediction(name: str, model: Model, gpu: str, counts: Mapping[int, Counts]) -> list[dict[str, Any]]:
    """A row for the plain step, and one for each larger step."""
    sheet = GPUS[gpu]
    readable = sheet.bytes_per_second * ASSUMED.readable
    seconds = {nodes: predict(each, nodes, readable, sheet.flops, sheet.overlaps) for nodes, each in counts.items()}
    plain = sum(seconds[0].values())
    rows = []
    for nodes, parts in seconds.items():
        total, least = sum(parts.values()), counts[nodes].needed_bytes / readable
        row = {"model": name, "gpu": gpu, "nodes": nodes, "fits": model.weights_gb < sheet.memory_gb}
        row |= {"ms": {part: round(1e3 * each, 3) for part, each in parts.items()}, "step_ms": round(1e3 * total, 2)}
        row |= {"share_of_readable": round(least / total, 3), "share_of_sheet": round(least / total * ASSUMED.readable, 3)}
        peer = parts["linear"] + counts[nodes].text_bytes / (readable * ASSUMED.kernel)
        peer += gpt_fast_launches(model.layers) * ASSUMED.launch_seconds
        row |= {"gpt_fast_ms": round(1e3 * peer, 2), "over_plain": round(total / plain, 3)}
        rows.append(row)
    return rows


def run(models: Mapping[str, Model], gpus: Mapping[str, GPU]) -> dict[str, Any]:
    """Counts and predictions of all models."""
    from bench.model.traffic import count_step  # needs Triton and a C++ compiler, unlike the tables

    counted = {
        name: {nodes: stored(count_step(model.config(), nodes, model.context), model.bits) for nodes in (0, *model.nodes)}
        for name, model in models.items()
    }
    return {
        "kind": "a prediction, which docs/roofline.md compares with a measurement",
        "assumptions": asdict(ASSUMED),
        "counts": {
            name: {"context": models[name].context} | {str(nodes): asdict(each) for nodes, each in by.items()}
            for name, by in counted.items()
        },
        "predictions": [row for name in models for gpu in gpus for row in prediction(name, models[name], gpu, counted[name])],
    }


def predictions_table(results: Mapping[str, Any], gpu: str) -> str:
    """A Markdown table of the predicted milliseconds on one GPU, of a plain step and one whose rows are captured."""
    headers = ["model", "plain step", f"{NODES[0]} nodes", "quotient", "share", "launches", "gpt-fast"]
    lines = ["| " + " | ".join(headers) + " |", "|---" * len(headers) + "|"]
    steps = {(row["model"], row["nodes"]): row for row in results["predictions"] if row["gpu"] == gpu and row["fits"]}
    for model in MODELS:
        if (model, 0) in steps:
            plain, drafted = steps[model, 0], steps[model, NODES[0]]
            figures = [plain["step_ms"], drafted["step_ms"], drafted["over_plain"], plain["share_of_readable"]]
            launches, peer = sum(results["counts"][model]["0"]["launches"].values()), plain["gpt_fast_ms"]
            lines.append(f"| {model} | {' | '.join(f'{each:.2f}' for each in figures)} | {launches} | {peer:.2f} |")
    return "\n".join(lines)


def main(out: Annotated[Path, typer.Option(help="Save the counts and predictions as JSON.")] = RESULT) -> None:
    """Count the bytes and launches of steps without a GPU, and predict their times."""
    results = run(MODELS, GPUS)
    report.save(out, results)
    columns = {"model": "model", "GPU": "gpu", "nodes": "nodes", "step\n(ms)": "step_ms", "over\nplain": "over_plain:.2f"}
    columns |= {"share of readable\nbandwidth": "share_of_readable:.3f", "gpt-fast\n(ms)": "gpt_fast_ms"}
    report.print_figures("Predicted steps", columns, [row for row in results["predictions"] if row["fits"]])


if __name__ == "__main__":
    typer.run(main)
