"""`python -m bench.formats`: what the formats of SmolLM2's weights and cache cost in quality, memory and time, on a CPU.

Quality is that of the summarization articles of Spec-Bench, against float32. All formats are timed in turns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from bench import report
from bench.live.questions import read_tasks
from bench.quality import window_scores
from outrider.models import smollm2
from outrider.server.settings import load_settings
from outrider.server.worker.runtime import load
from outrider.verify.measurement import timed_forward
from outrider.verify.model.batch import ForwardBatch
from outrider.verify.model.runner import ModelRunner
from outrider.verify.tokenizer import load_tokenizer

REFERENCE = "float32"
FORMATS: Mapping[str, Mapping[str, str]] = {
    REFERENCE: {"model.dtype": "float32"},
    "bfloat16": {"model.dtype": "bfloat16"},
    "int8": {"model.quantize": "int8"},
    "the file's blocks": {},
    "int8 cache": {"model.kv_dtype": "int8"},
    "fp8 cache": {"model.kv_dtype": "fp8"},
}
WINDOW, CONTEXTS, ROWS = 1024, (256, 4096), (1, 8, 16)
PROMPT_ROWS = 512
ROUNDS, STEPS_IN_TURN = 9, 4


def main(
    prompts: Annotated[Path, typer.Option(help="Spec-Bench's question.jsonl.")],
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of text for the quality.")] = 8192,
    out: Annotated[Path, typer.Option(help="Save the figures as JSON.")] = report.RESULTS / "formats-smollm2.json",
) -> None:
    """Measure every format."""
    common: dict[str, Any] = {"model.path": smollm2.NAME, "model.context_tokens": CONTEXTS[-1] + PROMPT_ROWS}
    runners = {name: load(load_settings(None, common | dict(flags))).runner for name, flags in FORMATS.items()}
    text = "\n\n".join(read_tasks(prompts)["summarization"])
    ids = load_tokenizer(str(smollm2.locate())).encode(text, verbose=False)[:tokens]
    windows = [ids[start : start + WINDOW] for start in range(0, len(ids), WINDOW)]
    scores = {name: score(runner, windows) for name, runner in runners.items()}
    times = time_all(runners)
    sizes = {name: (runner.weight_bits, runner.weight_bytes) for name, runner in runners.items()}
    rows = [size(*sizes[name]) | quality(name, scores[name], scores[REFERENCE]) | times[name] for name in FORMATS]
    figures = {"model": smollm2.NAME, "tokens": len(ids), "threads": torch.get_num_threads(), "rows": rows}
    if find_spec("llama_cpp") is not None:
        llama = quality("llama.cpp, the same file", llama_scores(windows), scores[REFERENCE])
        figures["llama.cpp"] = llama
        typer.echo(f"llama.cpp on the same file: {llama['more_nats']:+.3%} nats, {llama['same_choices']:.2%} the same choices")
    report.save(out, figures)
    columns = {"format": "format", "bits": "weight_bits:.1f", "MB": "weights_mb:.0f", "nats": "nats_per_token:.4f"}
    report.print_figures("Size and quality", columns | {"more": "more_nats:+.3%", "same": "same_choices:.1%"}, rows)
    columns = {"format": "format", "prompt\ntokens/s": "prompt_tokens_per_second:.0f"}
    columns |= {f"{count} at\n{context}": f"ms_{count}_rows_{context}_tokens:.1f" for context in CONTEXTS for count in ROWS}
    report.print_figures("Milliseconds of a step, by its rows and the tokens before", columns, rows)


def score(runner: ModelRunner, windows: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Nats of each token, and the likeliest tokens in their places."""
    nats, choices = zip(*(window_scores(runner, window) for window in windows), strict=True)
    return torch.cat(nats), torch.cat(choices)


def llama_scores(windows: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """`score` by llama.cpp, which reads the model's file."""
    from llama_cpp import Llama

    llama = Llama(str(smollm2.locate()), n_ctx=WINDOW, n_batch=WINDOW, logits_all=True, verbose=False)
    nats, choices = [], []
    for window in windows:
        llama.reset()
        llama.eval(list(window))
        logits = torch.from_numpy(llama.scores[: len(window) - 1]).double()
        nats.append(torch.nn.functional.cross_entropy(logits, torch.tensor(window[1:]), reduction="none"))
        choices.append(logits.argmax(-1))
    return torch.cat(nats), torch.cat(choices)


def size(bits: float, weight_bytes: int) -> dict[str, float]:
    """The size of a format."""
    return {"weight_bits": round(bits, 2), "weights_mb": round(weight_bytes / 1e6, 1)}


def quality(
    name: str, found: tuple[torch.Tensor, torch.Tensor], reference: tuple[torch.Tensor, torch.Tensor]
) -> dict[str, Any]:
    """What a format's nats and choices are beside the reference's."""
    nats, expected = found[0].mean().item(), reference[0].mean().item()
    return {
        "format": name,
        "nats_per_token": round(nats, 5),
        "more_nats": round(nats / expected - 1, 5),
        "same_choices": round((found[1] == reference[1]).double().mean().item(), 5),
    }


def time_all(runners: Mapping[str, ModelRunner]) -> dict[str, dict[str, float]]:
    """Median milliseconds of a step by its rows and context, and prompt tokens per second, in turns."""
    caches = {name: runner.new_cache() for name, runner in runners.items()}
    found: dict[str, dict[str, list[float]]] = {name: {} for name in runners}
    for _ in range(1 + ROUNDS):
        for name, runner in runners.items():
            cache = caches[name]
            for context in CONTEXTS:
                cache.length = 0
                cache.fill(context)
                for count in ROWS:
                    steps = [timed_forward(runner, cache, count - 1) for _ in range(STEPS_IN_TURN)]
                    seconds = statistics.median(steps[1:])  # the first one wakes threads
                    found[name].setdefault(f"ms_{count}_rows_{context}_tokens", []).append(1e3 * seconds)
            cache.length = 0
            started = time.perf_counter()
            runner.forward(cache, ForwardBatch.chain(torch.arange(PROMPT_ROWS)), logits=False)
            rate = PROMPT_ROWS / (time.perf_counter() - started)
            found[name].setdefault("prompt_tokens_per_second", []).append(rate)
    return {
        name: {key: round(statistics.median(values[1:]), 2) for key, values in figures.items()}  # the first round warms up
        for name, figures in found.items()
    }


if __name__ == "__main__":
    typer.run(main)
