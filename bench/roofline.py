"""`python -m bench.roofline`: predicts the steps of GPUs from the bytes and launches that are counted without one.

docs/roofline.md shows the predictions, says where each assumption comes from, and compares them with what a GPU
took. Nothing here is a measurement.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from transformers import KimiLinearConfig, Qwen3_5TextConfig

from bench import report
from bench.model.counts import PARTS, Counts
from bench.model.shapes import SHAPES

RESULT = report.RESULTS / "roofline.json"
# What kernels use (`python -m tests.verify.model.gpu.compiled.figures`); and before they were joined, with the counts of then.
COMPILED, BEFORE = report.RESULTS / "kernels.json", report.RESULTS / "kernels-before.json"
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
    ranks: int = 1  # GPUs that have a part of each layer


MODELS = {
    "Llama-3.1-8B": Model(SHAPES["llama-3-8b"], 32, 16.1),
    "Qwen3-30B-A3B": Model(SHAPES["qwen3-30b-a3b"], 48, 61.1),
    "Llama-3.1-8B, 4 bits": Model(SHAPES["llama-3-8b"], 32, 6.0, 5.25),  # the layer of logits has 8
    "Qwen3-30B-A3B, 4 bits": Model(SHAPES["qwen3-30b-a3b"], 48, 19.8, 5.05),
    # With transformers' default sizes.
    "Qwen3.5-9B": Model(Qwen3_5TextConfig, 32, 17.9),
    "Kimi-Linear-48B-A3B": Model(KimiLinearConfig, 27, 98.2),
    "Llama-3.1-8B, 2 GPUs": Model(SHAPES["llama-3-8b"], 32, 16.1, ranks=2),
    "Llama-3.1-70B, 2 GPUs": Model(SHAPES["llama-3-70b"], 80, 141.1, ranks=2),
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


class Aim(NamedTuple):
    """The most milliseconds that a forward is to take after AIM_CONTEXT tokens."""

    model: str
    gpu: str
    nodes: int
    ms: float


AIM_CONTEXT = 64
AIMS = (
    Aim("Llama-3.1-8B", "H200", 0, 4.1),
    Aim("Llama-3.1-8B", "H200", 63, 5.0),
    Aim("Llama-3.1-8B, 4 bits", "H200", 0, 2.1),
    Aim("Qwen3-30B-A3B, 4 bits", "RTX 4090", 0, 3.5),
)


@dataclass(frozen=True)
class Assumptions:
    """Assumptions about everything that is not counted, with their sources. "Measured" is on an H200."""

    readable: float = 0.90  # of the data sheet's bandwidth: what a sum over a large tensor reads; measured
    product: float = 0.90  # of the readable bandwidth, by products of one row; measured
    kernel: float = 0.86  # of the readable bandwidth, by other kernels: gpt-fast's published step of Llama-2-7B
    # Products of 64 and of 72 rows over those of one row, with the rows that are read and the parts that are written; measured.
    rows_64: float = 1.16
    rows_72: float = 1.20
    cached: float = 0.5  # of what one kernel writes and the next one reads: the cache has it until then
    launch_seconds: float = 0.96e-6  # a small kernel of a graph, and where kernels overlap; both measured
    overlapped_seconds: float = 0.68e-6
    packing_seconds: float = 0.1e-3  # the inputs of a forward, on the host; launching 429 kernels was measured at 0.5 ms
    exchange_seconds: float = 5e-6  # of two GPUs, of few rows: vLLM's reduction in one stage on H100s, 4 to 5 us for 16 KB
    link_bytes_per_second: float = 0.36e12  # of NVLink to another GPU: 0.8 of the data sheet's
    host_seconds: float = 0.1e-3  # commit, text and messages, on the host
    draft_seconds: float = 0.2e-3  # on the host, with 64 nodes; docs/benchmarks.md

    def products(self, nodes: int) -> float:
        """The time of products with this number of nodes over that of one row's."""
        return 1.0 if not nodes else self.rows_64 if nodes < 64 else self.rows_72


ASSUMED = Assumptions()


def predict(counts: Counts, nodes: int, readable: float, flops: float, overlaps: bool = False) -> dict[str, float]:
    """Seconds of a step by part, on a GPU that reads `readable` bytes a second."""
    assumed = ASSUMED
    speed = dict.fromkeys(PARTS, readable * assumed.kernel) | {"linear": readable * assumed.product}
    once = {"linear": counts.weight_bytes, "attention": counts.text_bytes}
    moved = {part: size - assumed.cached * (size - once.get(part, 0.0)) for part, size in counts.bytes.items()}
    launched = dict.fromkeys(PARTS, assumed.launch_seconds)
    if overlaps:  # kernels of ours do; those that torch.compile makes do not
        launched |= dict.fromkeys(("linear", "attention"), assumed.overlapped_seconds)
    seconds = {part: moved[part] / speed[part] for part in PARTS}
    products = counts.weight_bytes / speed["linear"] * assumed.products(nodes) if nodes else seconds["linear"]
    return seconds | {
        "linear": max(products, counts.flops / flops),
        "launches": sum(launched[part] * count for part, count in counts.launches.items()),
        "host": assumed.packing_seconds + assumed.host_seconds + (assumed.draft_seconds if nodes else 0.0),
    }


def stored(counts: Counts, bits: float) -> Counts:
    less = counts.weight_bytes * (1.0 - bits / 16.0)
    parts = counts.bytes | {"linear": counts.bytes["linear"] - less}
    return replace(counts, bytes=parts, weight_bytes=counts.weight_bytes - less)


def split(counts: Counts, model: Model) -> Counts:
    """The counts of each of a model's GPUs, which add the parts of sums by further kernels, two a layer."""
    parts = {part: size / (model.ranks if part in ("linear", "attention") else 1) for part, size in counts.bytes.items()}
    launches = counts.launches | {"linear": counts.launches["linear"] + 2 * model.layers + 1}
    of_rank = {name: getattr(counts, name) / model.ranks for name in ("weight_bytes", "text_bytes", "flops")}
    return Counts(parts, launches, **of_rank)


def exchanges(model: Model, rows: int) -> float:
    """Seconds in which GPUs wait for each other: latency, and float32 parts of 4 (hidden size 4096) or 2 splits, and logits."""
    hidden, vocabulary = int(model.config().hidden_size), int(model.config().vocab_size)
    parts = model.layers * 2 * rows * hidden * 4 * (4 if hidden <= 4096 else 2) / model.ranks
    latency = (2 * model.layers + 1) * ASSUMED.exchange_seconds
    return latency + (parts + rows * vocabulary) / ASSUMED.link_bytes_per_second


def prediction(name: str, model: Model, gpu: str, counts: Mapping[int, Counts]) -> list[dict[str, Any]]:
    """A row for the plain step, and one for each larger step."""
    sheet = GPUS[gpu]
    readable = sheet.bytes_per_second * ASSUMED.readable
    if model.ranks > 1:
        counts = {nodes: split(each, model) for nodes, each in counts.items()}
    seconds = {nodes: predict(each, nodes, readable, sheet.flops, sheet.overlaps) for nodes, each in counts.items()}
    if model.ranks > 1:
        seconds = {nodes: parts | {"exchanges": exchanges(model, nodes + 1)} for nodes, parts in seconds.items()}
    rows = []
    for nodes, parts in seconds.items():
        total, least = sum(parts.values()), counts[nodes].needed_bytes / readable
        row = {"model": name, "gpu": gpu, "nodes": nodes, "fits": model.weights_gb / model.ranks < sheet.memory_gb}
        row |= {"ms": {part: round(1e3 * each, 3) for part, each in parts.items()}, "step_ms": round(1e3 * total, 2)}
        row |= {"share_of_readable": round(least / total, 3), "share_of_sheet": round(least / total * ASSUMED.readable, 3)}
        rows.append(row)
    return rows


def aimed(aim: Aim, counts: Counts) -> dict[str, Any]:
    """The aim beside the predicted forward, without the host."""
    sheet = GPUS[aim.gpu]
    parts = predict(counts, aim.nodes, sheet.bytes_per_second * ASSUMED.readable, sheet.flops, sheet.overlaps)
    ms = {part: round(1e3 * each, 3) for part, each in parts.items() if part != "host"}
    return {**aim._asdict(), "context": AIM_CONTEXT, "parts_ms": ms, "forward_ms": round(sum(ms.values()), 2)}


def run(models: Mapping[str, Model], gpus: Mapping[str, GPU], aims: Sequence[Aim]) -> dict[str, Any]:
    from bench.model.traffic import count_step  # needs Triton and a C++ compiler, unlike the tables

    def counted_at(name: str, nodes: int, context: int) -> Counts:
        return stored(count_step(models[name].config(), nodes, context), models[name].bits)

    counted = {
        name: {nodes: counted_at(name, nodes, model.context) for nodes in (0, *model.nodes)} for name, model in models.items()
    }
    return {
        "kind": "a prediction, which docs/roofline.md compares with a measurement",
        "assumptions": asdict(ASSUMED),
        "counts": {
            name: {"context": models[name].context} | {str(nodes): asdict(each) for nodes, each in by.items()}
            for name, by in counted.items()
        },
        "predictions": [row for name in models for gpu in gpus for row in prediction(name, models[name], gpu, counted[name])],
        "aims": [aimed(aim, counted_at(aim.model, aim.nodes, AIM_CONTEXT)) for aim in aims],
    }


def predictions_table(results: Mapping[str, Any], before: Mapping[str, Any], gpu: str) -> str:
    """A Markdown table of the predicted milliseconds on one GPU, of a plain step and one whose rows are captured."""
    lines = heading(["model", "plain step", f"{NODES[0]} nodes", "share", "launches", "in a layer", "GB"])
    steps = {(row["model"], row["nodes"]): row for row in results["predictions"] if row["gpu"] == gpu and row["fits"]}
    for name, model in MODELS.items():
        if (name, 0) in steps:
            plain, drafted = steps[name, 0], steps[name, NODES[0]]
            figures = [f"{each:.2f}" for each in (plain["step_ms"], drafted["step_ms"], plain["share_of_readable"])]
            exchanged = 2 * model.layers + 1 if model.ranks > 1 else 0
            counts = [each["counts"][name]["0"] for each in (before, results) if name in each["counts"]]
            launches = [sum(each["launches"].values()) + exchanged for each in counts]
            per_layer, gigabytes = (
                [each / model.layers for each in launches],
                [sum(each["bytes"].values()) / 1e9 for each in counts],
            )
            figures += [change(launches, "d"), change(per_layer, ".1f"), change(gigabytes, ".2f")]
            lines.append(f"| {name} | {' | '.join(figures)} |")
    return "\n".join(lines)


def change(figures: Sequence[float], spec: str) -> str:
    """A figure, after what it was before if that is known."""
    return "→".join(format(each, spec) for each in figures)


def kernels_table(results: Mapping[str, Any], before: Mapping[str, Any]) -> str:
    """A Markdown table of what each kernel uses, by compute capability, after what some used before."""
    rows = {(row["kernel"], row["capability"]): used(row) for row in results["kernels"]}
    earlier = {(row["kernel"], row["capability"]): used(row) for row in before["kernels"]}
    kernels, capabilities = (dict.fromkeys(each) for each in zip(*rows, strict=True))
    columns: dict[tuple[str, ...], list[str]] = {}  # capabilities with equal cells share a column
    for capability in capabilities:
        of_all = {at: "→".join(filter(None, (earlier.get(at), rows[at]))) for at in rows if at[1] == capability}
        columns.setdefault(tuple(of_all.get((kernel, capability), "") for kernel in kernels), []).append(str(capability / 10))
    headers = ["kernel", *(", ".join(each) for each in columns.values())]
    lines = [f"| {' | '.join(cells)} |" for cells in zip(kernels, *columns, strict=True)]
    return "\n".join([*heading(headers), *lines])


def used(row: Mapping[str, Any]) -> str:
    """Registers, with the bytes of spilled ones, barriers, and instructions per weight."""
    spilled = f"+{row['spilled_bytes']}" if row["spilled_bytes"] else ""
    per_weight = f"/{row['instructions_per_weight']:.1f}" if row["instructions_per_weight"] else ""
    return f"{row['registers']}{spilled}/{row['barriers']}{per_weight}"


def aims_table(results: Mapping[str, Any]) -> str:
    """A Markdown table of the aims, the predicted forwards and their largest parts, in milliseconds."""
    lines = heading(["forward", "GPU", "rows", "aim", "predicted", "products", "launches"])
    for row in results["aims"]:
        parts = " | ".join(f"{row['parts_ms'][part]:.2f}" for part in ("linear", "launches"))
        lines.append(
            f"| {row['model']} | {row['gpu']} | {row['nodes'] + 1} | {row['ms']} | {row['forward_ms']:.2f} | {parts} |"
        )
    return "\n".join(lines)


def heading(names: Sequence[str]) -> list[str]:
    return ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]


def main(out: Annotated[Path, typer.Option(help="Save the counts and predictions as JSON.")] = RESULT) -> None:
    """Count the bytes and launches of steps without a GPU, and predict their times."""
    results = run(MODELS, GPUS, AIMS)
    report.save(out, results)
    columns = {"model": "model", "GPU": "gpu", "nodes": "nodes", "step\n(ms)": "step_ms"}
    columns |= {"share of readable\nbandwidth": "share_of_readable:.3f"}
    report.print_figures("Predicted steps", columns, [row for row in results["predictions"] if row["fits"]])


if __name__ == "__main__":
    typer.run(main)
