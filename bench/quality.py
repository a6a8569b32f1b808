"""`outrider verify-quality`: what quantisation and rounding cost, on a text, against the same weights in float32.

Nats per token, how often the most probable token is the same, and the error of the likeliest log-probabilities. Rows are
computed as steps compute them, so the figures are those of the answers.
"""

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
# The log-probabilities that are compared at each place.
LIKELIEST = 10


@dataclass(frozen=True)
class Scores:
    """A model's scores of a text."""

    nats: torch.Tensor  # float64 [T], of each token after the first of its window
    choices: torch.Tensor  # int64 [T], the most probable tokens
    likeliest: torch.Tensor  # int64 [T, LIKELIEST], those of the reference
    logs: torch.Tensor  # float64 [T, LIKELIEST], their log-probabilities
    weights_mb: float
    weight_bits: float
    row_bytes: int  # of a position's keys and values


def run(settings: Settings, text: Path, window: int, tokens: int, out: Path | None) -> dict[str, Any]:
    """Compares, prints, and saves the figures if `out` is given. Raises BenchError and ModelError."""
    model = settings.model
    windows = read_windows(text, settings, window, tokens)
    full = model.model_copy(update={"quantize": "none", "kv_dtype": "auto", "dtype": "float32"})
    reference = scores(settings.model_copy(update={"model": full}), windows)
    names = {"model": model.served_name, "quantize": model.quantize, "kv_dtype": model.kv_dtype, "text": text.name}
    figures = compare(reference, scores(settings, windows, reference.likeliest)) | names
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


def scores(settings: Settings, windows: Sequence[Sequence[int]], likeliest: torch.Tensor | None = None) -> Scores:
    """Loads the model of these settings and reads the windows. `likeliest`: of the reference; None = this is it."""
    runner = load_target(settings)
    torch.set_num_threads(settings.model.threads or default_threads(runner))
    longest = max(map(len, windows))
    if longest > runner.model_tokens:
        raise BenchError(f"The model supports {runner.model_tokens} tokens; set --window to at most {runner.model_tokens}.")
    backend.start(runner, settings.model.path, longest)
    bits, parts, before = runner.weight_bits, [], 0
    for window in track(windows, f"reading with {bits:g} bits per weight"):
        rows = len(window) - 1
        parts.append(window_scores(runner, window, None if likeliest is None else likeliest[before : before + rows]))
        before += rows
    nats, choices, places, logs = (torch.cat(values) for values in zip(*parts, strict=True))
    megabytes = round(runner.weight_bytes / 1e6, 1)
    return Scores(nats, choices, places, logs, megabytes, bits, runner.cache_shape.bytes_for(1))


def window_scores(runner: ModelRunner, window: Sequence[int], likeliest: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """Of each place but the last: the next token's nats, the most probable token, the likeliest ones, their logarithms."""
    cache, ids, parts = runner.new_cache(), torch.tensor(window), []
    for start in range(0, len(ids) - 1, ROWS):
        end = min(start + ROWS, len(ids) - 1)
        logits = torch.as_tensor(runner.forward(cache, ForwardBatch.chain(ids[start:end]))).cpu().double()
        cache.length += end - start
        logs = logits.log_softmax(-1)
        places = logs.topk(min(LIKELIEST, logs.shape[-1])).indices if likeliest is None else likeliest[start:end]
        nats = -logs.gather(-1, ids[start + 1 : end + 1, None])[:, 0]
        parts.append((nats, logits.argmax(-1), places, logs.gather(-1, places)))
    return tuple(torch.cat(values) for values in zip(*parts, strict=True))


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
        "error_of_logarithms": round((reference.logs - quantized.logs).abs().mean().item(), 5),
    }


def show(figures: dict[str, Any]) -> None:
    """Prints both models in one table."""
    rows = ("weight_bits", "weights_mb", "kv_bytes_per_token", "nats_per_token", "perplexity")
    labels = ("bits per weight", "weights (MB)", "cache (bytes per token)", "nats per token", "perplexity")
    setting = f"quantize {figures['quantize']}, kv_dtype {figures['kv_dtype']}"
    report.print_table(
        f"{figures['model']}, {setting}, on {figures['tokens']} tokens",
        ("figure", "float32", "served"),
        [(label, *figures[name]) for name, label in zip(rows, labels, strict=True)],
        f"nats per token: {figures['more_nats']:+.2%}; "
        f"most probable token the same: {figures['same_greedy_tokens']:.2%} of the places; "
        f"error of the {LIKELIEST} likeliest log-probabilities: {figures['error_of_logarithms']:.4f}.",
    )
