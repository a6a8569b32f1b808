"""`outrider verify-quality`: what quantisation costs, on a text, against the same model with its full weights and cache.

Nats per token, and how often the most probable token is the same. Rows are computed as steps compute them, so the figures are
those of the answers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

from bench import report
from bench.plan import BenchError
from outrider.drafters.interface import MAX_NODES
from outrider.server.settings import Settings
from outrider.server.worker.runtime import default_threads, load_target
from outrider.verify.model import backend
from outrider.verify.model.batch import ForwardBatch
from outrider.verify.model.runner import ModelRunner
from outrider.verify.tokenizer import load_tokenizer

# The rows of a step.
ROWS = MAX_NODES + 1


@dataclass(frozen=True)
class Scores:
    """What a model says about a text."""

    nats: torch.Tensor  # float64 [T], of each token after the first of its window
    choices: torch.Tensor  # int64 [T], the most probable tokens
    weights_mb: float
    weight_bits: float
    row_bytes: int  # of a position's keys and values


def run(settings: Settings, text: Path, window: int, tokens: int, out: Path | None) -> dict[str, Any]:
    """Compares, prints, and saves the figures if `out` is given. Raises BenchError and ModelError."""
    model = settings.model
    if model.quantize == "none" and model.kv_dtype == "auto":
        raise BenchError("Set --model.quantize or --model.kv_dtype, to compare the model with its full weights and cache.")
    windows = read_windows(text, settings, window, tokens)
    full = settings.model_copy(update={"model": model.model_copy(update={"quantize": "none", "kv_dtype": "auto"})})
    reference, quantized = (scores(settings, windows) for settings in (full, settings))
    names = {"model": model.served_name, "quantize": model.quantize, "kv_dtype": model.kv_dtype, "text": text.name}
    figures = compare(reference, quantized) | names
    show(figures)
    if out:
        report.save(out, figures)
    return figures


def read_windows(text: Path, settings: Settings, window: int, tokens: int) -> list[list[int]]:
    """The first `tokens` tokens of the text, in windows that are read by themselves. Raises BenchError."""
    try:
        content = text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"{text} is not a text in UTF-8: {error}") from None
    model = settings.model
    tokenizer = load_tokenizer(model.path, model.trust_remote_code, model.revision)
    ids = tokenizer.encode(content[: 16 * tokens], verbose=False)[:tokens]
    windows = [ids[start : start + window] for start in range(0, len(ids), window)]
    windows = [each for each in windows if len(each) > 1]
    if not windows:
        raise BenchError(f"{text} has fewer than two tokens.")
    return windows


def scores(settings: Settings, windows: Sequence[Sequence[int]]) -> Scores:
    """Loads the model of these settings and reads the windows."""
    runner = load_target(settings)
    torch.set_num_threads(settings.model.threads or default_threads(runner))
    longest = max(map(len, windows))
    if longest > runner.model_tokens:
        raise BenchError(f"The model supports {runner.model_tokens} tokens; set --window to at most as many.")
    backend.start(runner, settings.model.path, longest)
    bits = runner.weight_bits
    parts = [window_scores(runner, window) for window in track(windows, f"reading with {bits:g} bits per weight")]
    nats, choices = (torch.cat(values) for values in zip(*parts, strict=True))
    return Scores(nats, choices, round(runner.weight_bytes / 1e6, 1), bits, runner.cache_shape.bytes_for(1))


def window_scores(runner: ModelRunner, window: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Nats of each token after the first, and the most probable tokens in their places."""
    cache, ids, nats, choices = runner.new_cache(), torch.tensor(window), [], []
    for start in range(0, len(ids) - 1, ROWS):
        rows = ids[start : min(start + ROWS, len(ids) - 1)]
        logits = torch.as_tensor(runner.forward(cache, ForwardBatch.chain(rows))).cpu().double()
        cache.length += len(rows)
        following = ids[start + 1 : start + 1 + len(rows)]
        nats.append(torch.nn.functional.cross_entropy(logits, following, reduction="none"))
        choices.append(logits.argmax(-1))
    return torch.cat(nats), torch.cat(choices)


def compare(reference: Scores, quantized: Scores) -> dict[str, Any]:
    """The figures of both models."""
    given, expected = quantized.nats.mean().item(), reference.nats.mean().item()
    return {
        "tokens": len(reference.nats),
        "weight_bits": [reference.weight_bits, quantized.weight_bits],
        "weights_mb": [reference.weights_mb, quantized.weights_mb],
        "kv_bytes_per_token": [reference.row_bytes, quantized.row_bytes],
        "nats_per_token": [round(expected, 5), round(given, 5)],
        "perplexity": [round(math.exp(min(value, 700.0)), 3) for value in (expected, given)],
        "more_nats": round(given / expected - 1, 5),
        "same_greedy_tokens": round((reference.choices == quantized.choices).double().mean().item(), 5),
    }


def show(figures: dict[str, Any]) -> None:
    """Prints both models in one table."""
    rows = ("weight_bits", "weights_mb", "kv_bytes_per_token", "nats_per_token", "perplexity")
    labels = ("bits per weight", "weights (MB)", "cache (bytes per token)", "nats per token", "perplexity")
    setting = f"quantize {figures['quantize']}, kv_dtype {figures['kv_dtype']}"
    report.print_table(
        f"{figures['model']}, {setting}, on {figures['tokens']} tokens",
        ("figure", "full", "quantised"),
        [(label, *figures[name]) for name, label in zip(rows, labels, strict=True)],
        f"nats per token: {figures['more_nats']:+.2%}; "
        f"most probable token the same: {figures['same_greedy_tokens']:.2%} of the places.",
    )
