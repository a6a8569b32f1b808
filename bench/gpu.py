"""`python -m bench.gpu`: all that needs a GPU, checked and measured by one command in minutes.

Each part is saved as soon as it is done, so a run that is cut off leaves what it had. Without a GPU it says so and ends.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from bench import report
from bench.decode import Plan, read_prompts
from bench.model.bandwidth import read_bytes_per_second
from server.settings import Settings
from verify.model.attention import Layer, TorchAttention
from verify.model.batch import ForwardBatch
from verify.model.cache import CacheShape, KVCache
from verify.model.device_rows import DeviceRows

TESTS = (
    "tests/verify/test_tree_kernel.py",
    "tests/verify/test_graphed.py",
    "tests/verify/test_gpu.py",
    "tests/verify/test_draft_model.py",
)
CONTEXTS = (1, 63, 1000, 4096, 32768)
HEADS = 32
GROUPS = (1, 2, 4, 8, 16, 32)  # query heads to a key head
HEAD_DIMS = (64, 96, 128, 256)
ROWS = (1, 9, 65)
SHAPE = "llama-2-7b"
DRAFT_SHAPES = ("llama-160m", "llama-1b")
CONTEXT_TOKENS = 2304  # enough for the longest of the recorded answers that are replayed
KERNEL_ERROR = 0.03  # of outputs up to 4, in steps of 2^-7 there
PROMPTS = Path(__file__).parent / "prompts.jsonl"


def start_tests() -> subprocess.Popen[str]:
    """The tests whose kernels run as they are here, elsewhere by an interpreter; beside whatever is not timed."""
    return subprocess.Popen([sys.executable, "-m", "pytest", "-q", *TESTS], stdout=subprocess.PIPE, text=True)


def tests(running: subprocess.Popen[str]) -> dict[str, Any]:
    """How they went."""
    said, _ = running.communicate()
    failed = [line for line in said.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return {"passed": running.returncode == 0, "summary": said.strip().splitlines()[-1:], "failed": failed}


@torch.inference_mode()
def kernel_error(
    context: int, groups: int, head_dim: int, rows: int, dtype: torch.dtype, device: torch.device, heads: int = HEADS
) -> float:
    """The largest difference of the kernel from the reference in float32 on the same numbers, over a random tree."""
    from verify.model.triton_attention import KernelAttention

    generator = torch.Generator(device).manual_seed(context + groups)
    shape = CacheShape(1, heads // groups, head_dim, dtype, device)
    slot = KVCache(shape, context + rows)
    slot.tensor.normal_(generator=generator)
    slot.length = context
    exact = KVCache(CacheShape(1, heads // groups, head_dim, torch.float32, device), context + rows)
    exact.tensor.copy_(slot.tensor)
    exact.length = context
    ancestors = torch.eye(rows, dtype=torch.bool)
    for row in range(1, rows):
        ancestors[row] |= ancestors[int(torch.randint(0, row, (1,)))]
    query, key, value = (
        torch.randn(count, rows, head_dim, generator=generator, device=device).to(dtype)
        for count in (heads, heads // groups, heads // groups)
    )
    batch = ForwardBatch(torch.zeros(rows, dtype=torch.int64), ancestors.sum(1) - 1, ancestors)
    layer = Layer(0, head_dim**-0.5)
    device_rows = DeviceRows(shape, max(ROWS))
    device_rows.set(slot, batch)
    found = KernelAttention(device_rows, rows, slot.positions).attend(layer, query, key, value)
    reference = TorchAttention(exact, batch)
    expected = reference.attend(layer, query.float(), key.float(), value.float())
    return float((found.float() - expected).abs().max())


def kernel() -> dict[str, Any]:
    """bfloat16 against the reference, over contexts, all ratios of query to key heads, head sizes and rows."""
    device = torch.device("cuda")
    worst: dict[str, float] = {}
    cases = [(c, g, d, n) for c in CONTEXTS for g in GROUPS for d in HEAD_DIMS for n in ROWS]
    for context, groups, head_dim, rows in cases:
        error = kernel_error(context, groups, head_dim, rows, torch.bfloat16, device)
        worst[str(context)] = max(worst.get(str(context), 0.0), error)
    return {"cases": len(cases), "largest_error_by_context": worst}


def steps(compile: str) -> Callable[[], dict[str, Any]]:
    """What a step costs at the shape of Llama-2-7B, by nodes and context."""
    from bench.model.steps import run_steps

    def measured() -> dict[str, Any]:
        chosen = {"dtype": "bfloat16", "compile": compile, "context_tokens": CONTEXT_TOKENS}
        figures = run_steps(SHAPE, Settings.model_validate({"model": chosen}), None)
        torch.cuda.empty_cache()
        return figures

    return measured


def forced(stream: Path, tokenizer: str, corpus: Path | None, limit: int) -> Callable[[], dict[str, Any]]:
    """Real forwards of that shape, the recorded answers of a real model of that shape."""
    from bench.model.steps import run_forced

    def measured() -> dict[str, Any]:
        settings = Settings.model_validate({"model": {"dtype": "bfloat16", "context_tokens": CONTEXT_TOKENS}})
        return run_forced(SHAPE, settings, stream, tokenizer, [corpus] if corpus else [], ["none", "fusion"], limit, 1, None)

    return measured


def drafting(draft_shape: str) -> Callable[[], dict[str, Any]]:
    """A target of that shape with a draft model of another, right in four of five guesses: chains, trees, graphs and PEARL."""
    from bench.drafting import run_shapes

    def measured() -> dict[str, Any]:
        settings = Settings.model_validate({"model": {"dtype": "bfloat16", "context_tokens": 1024}})
        figures = run_shapes(settings, Plan(["none"], [""], [0.0], 192, 3), (SHAPE, draft_shape), 0.8, None)
        torch.cuda.empty_cache()
        return figures

    return measured


def lossless() -> dict[str, Any]:
    """The embedded model in float32: drafted answers are plain decoding's."""
    from bench.lossless import run

    plan = Plan(["trigram", "fusion"], read_prompts(PROMPTS, 8), [0.0, 0.8], 96, 1)
    divergences = run(Settings.model_validate({"model": {"dtype": "float32"}}), plan)
    return {"divergences": len(divergences), "margins": [each.margin for each in divergences]}


def memory() -> dict[str, Any]:
    """Whether steps in steady state take memory from the device: the segments that torch holds, before and after."""
    from bench.decode import answer, encode
    from server.worker.runtime import load

    settings = Settings()
    loaded = load(settings)
    plan = Plan(["fusion"], read_prompts(PROMPTS, 1), [0.8], 256, 1)
    prompt = encode(loaded, plan.prompts[0])
    seen = []
    for _ in range(4):
        answer(loaded, settings, "fusion", prompt, 0.8, plan)
        seen.append(torch.cuda.memory_stats()["segment.all.allocated"])
    speed = read_bytes_per_second(loaded.runner)
    return {"segments_allocated_after_answers": seen, "read_gb_per_second": round(speed / 1e9, 1)}


def claims(figures: dict[str, Any]) -> dict[str, bool]:
    """What is said of a GPU, and whether these figures bear it out; nothing of parts that are not there."""
    found: dict[str, bool] = {}
    done = {name: part for name, part in figures.items() if "error" not in part}
    if "kernel" in done:
        found["the kernel agrees to bfloat16"] = max(done["kernel"]["largest_error_by_context"].values()) < KERNEL_ERROR
    if "lossless" in done:
        found["drafted answers are plain decoding's"] = done["lossless"]["divergences"] == 0
    if "memory" in done:
        found["steps take no memory"] = len(set(done["memory"]["segments_allocated_after_answers"][1:])) == 1
    if "tests" in done:
        found["the tests pass"] = done["tests"]["passed"]
    if "steps" in done:
        found["a single-token step reads at 80 % of the memory's speed"] = (
            done["steps"]["single_token_step_share_of_bandwidth"] >= 0.8
        )
        found["64 rows cost 1.25 times one at most"] = done["steps"]["nodes_over_single"]["63"] <= 1.25
    if "forced" in done:
        found["forced replay is 2.3 times plain decoding"] = done["forced"]["results"][-1]["times_none"] >= 2.3
    return found


def main(
    out: Annotated[Path, typer.Option(help="Where the figures go.")] = report.RESULTS / "gpu.json",
    stream: Annotated[
        Path | None, typer.Option(help="A recorded stream of a Llama-2-7B-shaped model, for forced replay.")
    ] = None,
    tokenizer: Annotated[str, typer.Option(help="Its tokenizer.")] = "",
    corpus: Annotated[Path | None, typer.Option(help="Texts to index for it.")] = None,
    limit: Annotated[int, typer.Option(help="Recorded lines replayed.")] = 6,
) -> None:
    """Checks and measures everything that needs a GPU."""
    if not torch.cuda.is_available():
        print("bench.gpu: torch sees no GPU here; run this on a machine that has one.", file=sys.stderr)
        raise typer.Exit(2)
    begun = time.perf_counter()
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "kernel": kernel,
        "lossless": lossless,
        "tests": partial(tests, start_tests()),
        "memory": memory,
        "steps": steps("on"),
    }
    for draft_shape in DRAFT_SHAPES:
        parts[f"drafting_{draft_shape}"] = drafting(draft_shape)
    if stream is not None:
        parts["forced"] = forced(stream, tokenizer, corpus, limit)
    parts["steps_without_compile"] = steps("off")
    figures: dict[str, Any] = {}
    for name, part in parts.items():
        started = time.perf_counter()
        try:
            figures[name] = part()
        except Exception as error:  # one part's failure shall not cost the others
            figures[name] = {"error": f"{type(error).__name__}: {error}"[:500]}
        figures[name]["seconds"] = round(time.perf_counter() - started, 1)
        Console().print(name, figures[name])
        whole = {"claims": claims(figures), "seconds": round(time.perf_counter() - begun, 1)}
        report.save(out, figures | whole)
    Console().print(whole)


if __name__ == "__main__":
    typer.run(main)
