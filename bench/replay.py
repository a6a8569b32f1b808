"""`outrider bench replay`: drafters against recorded answers. No model; exact for greedy decoding.

What a verifier would accept of a draft is what agrees with the recorded text, and every step emits one token more.
Definitions: state is fresh for every line of a stream, its prompt included; the first token of a response is a step of its
own. So nothing learned crosses from one line to another.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
import tracemalloc
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench import report
from bench.decode import BenchError
from drafters.interface import EMPTY, Drafter, Ints, Verdict
from drafters.options import DrafterName, Options
from drafters.registry import Resources, make, warm
from drafters.sequence import Sequence
from drafters.tables import ngram, suffix
from server.datastore import DatastoreError, find_files, read_texts
from verify.acceptance import walk
from verify.errors import ModelError
from verify.tokenizer import load_tokenizer


class Encoder(Protocol):
    """The part of a tokenizer that is needed here."""

    def encode(self, text: str) -> list[int]: ...

    def __len__(self) -> int: ...


@dataclass(frozen=True)
class Line:
    """A recorded answer, and the prompt it answers."""

    prompt: Ints  # int32 [P]
    answer: Ints  # int32 [A]


@dataclass
class Tally:
    """One drafter over one stream at one budget."""

    tokens: int = 0
    steps: int = 0
    propose_seconds: list[float] = field(default_factory=list)
    observe_seconds: list[float] = field(default_factory=list)
    memory_bytes: int = 0  # of one session's drafter
    accepted_at: Counter[int] = field(default_factory=Counter)  # position in the block -> blocks that reached it

    def figures(self) -> dict[str, Any]:
        """Tokens per step, microseconds, and the share of steps that accepted at least 1, 2, ... draft tokens."""
        both = [p + o for p, o in zip(self.propose_seconds, self.observe_seconds, strict=True)]
        return {
            "tokens_per_step": round(self.tokens / self.steps, 4),
            "steps": self.steps,
            "propose_us": quantiles(self.propose_seconds),
            "observe_us": quantiles(self.observe_seconds),
            "propose_and_observe_us": quantiles(both),
            "memory_mb": round(self.memory_bytes / 1e6, 2),
            "accepted_per_position": [round(n / self.steps, 4) for _, n in sorted(self.accepted_at.items())][:16],
        }


def quantiles(seconds: Collection[float]) -> dict[str, float]:
    """Median and 99th percentile, in microseconds."""
    if len(seconds) < 2:
        return {"p50": 0.0, "p99": 0.0}
    cuts = statistics.quantiles(seconds, n=100)
    return {"p50": round(1e6 * cuts[49], 1), "p99": round(1e6 * cuts[98], 1)}


def load_encoder(path: str) -> Encoder:
    """A sentencepiece .model file, or a tokenizer folder or hub id. Raises BenchError."""
    if path.endswith(".model"):
        import sentencepiece

        try:
            return cast(Encoder, sentencepiece.SentencePieceProcessor(model_file=path))
        except OSError:
            raise BenchError(f"{path} is no sentencepiece model.") from None
    try:
        return cast(Encoder, load_tokenizer(path))
    except ModelError as error:
        raise BenchError(str(error)) from None


def load_stream(path: Path, encoder: Encoder, limit: int | None) -> tuple[list[Line], float | None]:
    """The recorded answers of a stream, and the tokens per step of its recorded REST run where it has one."""
    lines: list[Line] = []
    reference_tokens = reference_steps = 0
    try:
        for text in path.read_text().splitlines()[:limit]:
            record = json.loads(text)
            pair = (np.array(encoder.encode(record[name]), np.int32) for name in ("prompt", "response"))
            lines.append(Line(*pair))
            recorded = record.get("rest_reference") or {}
            reference_tokens += recorded.get("new_tokens", 0)
            reference_steps += recorded.get("steps", 0)
    except (OSError, ValueError, KeyError) as error:
        raise BenchError(f"{path} is no stream ({error}); it takes .jsonl lines with `prompt` and `response`.") from None
    return lines, reference_tokens / reference_steps if reference_steps else None


def load_corpus(paths: list[Path], encoder: Encoder) -> NDArray[np.uint32]:
    """All texts as token ids, the number of tokens as separator before each. Raises BenchError."""
    separator = len(encoder)
    parts = [np.empty(0, np.uint32)]
    try:
        for file in find_files(paths):
            parts += [np.array([separator, *encoder.encode(text)], np.uint32) for text in read_texts(file)]
    except DatastoreError as error:
        raise BenchError(str(error)) from None
    return np.concatenate(parts)


def tables(corpus: NDArray[np.uint32], separator: int, options: Options) -> Resources:
    """The corpus as each drafter reads it; empty tables for an empty corpus."""
    if not len(corpus):
        return Resources(options, vocabulary=separator + 1)
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "table"
        ngram.build(table, [corpus], "replay", separator, options.trigram.successors, order=options.trigram.order)
        base = ngram.load(table)
        return Resources(options, base, [suffix.index(corpus, separator)], separator + 1)


def footprint(name: DrafterName, resources: Resources) -> int:
    """What one session's drafter takes, in bytes; the tables that sessions share not counted."""
    tracemalloc.start()
    try:
        drafter = make(name, resources)
        return tracemalloc.get_traced_memory()[0] if drafter else 0
    finally:
        tracemalloc.stop()


def replay(drafter: Drafter, line: Line, budget: int, tally: Tally) -> None:
    """One recorded answer, counted into `tally`."""
    sequence = Sequence(line.prompt)
    drafter.begin(sequence)
    answer, at = line.answer, 0
    padded = np.concatenate([answer, np.full(65, -1, np.int32)])  # -1 is no token: nothing matches beyond the end
    while at < len(answer):
        started = time.perf_counter()
        tree = drafter.propose(budget) if at else EMPTY
        proposed = time.perf_counter()
        chosen = padded[np.concatenate([[0], tree.depths]) + at]
        rows, tokens = walk(tree, chosen.tolist())
        verdict = Verdict(tree, rows, tokens).cut(len(answer) - at)
        ready = time.perf_counter()
        sequence.append(verdict.tokens)
        drafter.observe(verdict)
        if at:
            tally.propose_seconds.append(proposed - started)
            tally.observe_seconds.append(time.perf_counter() - ready)
        at += len(verdict.tokens)
        tally.steps += 1
        tally.accepted_at.update(range(1, len(verdict.rows) + 1))
    tally.tokens += len(answer)
    drafter.end()


def run(
    streams: Collection[Path],
    tokenizer: str,
    drafters: Collection[DrafterName],
    corpus: list[Path],
    nodes: Collection[int],
    limit: int | None,
    options: Options,
    out: Path | None,
    plot: Path | None,
) -> dict[str, Any]:
    """Replays every stream with every drafter at every budget; prints, and saves where asked. Raises BenchError."""
    encoder = load_encoder(tokenizer)
    resources = tables(load_corpus(corpus, encoder) if corpus else np.empty(0, np.uint32), len(encoder), options)
    warm(resources)
    loaded = {path.stem: load_stream(path, encoder, limit) for path in streams}
    rows: list[dict[str, Any]] = []
    with Progress() as progress:
        task = progress.add_task(
            "replaying", total=sum(len(lines) for lines, _ in loaded.values()) * len(drafters) * len(nodes)
        )
        for stream, (lines, reference) in loaded.items():
            if reference:
                rows.append(
                    {"stream": stream, "drafter": "REST's own run", "nodes": 64, "tokens_per_step": round(reference, 4)}
                )
            for name in drafters:
                for budget in nodes:
                    tally = Tally(memory_bytes=footprint(name, resources))
                    for line in lines:
                        replay(make(name, resources), line, budget, tally)
                        progress.advance(task)
                    rows.append({"stream": stream, "drafter": name, "nodes": budget, **tally.figures()})
    figures = {"tokenizer": Path(tokenizer).name, "corpus": [path.name for path in corpus], "results": rows}
    show(rows)
    if out:
        report.save(out, figures)
    if plot:
        draw(rows, plot)
    return figures


def show(rows: Collection[dict[str, Any]]) -> None:
    """The figures as a table."""
    names = ("propose us p50 / p99", "observe us p50 / p99", "accepted at 1, 2, 3 ...", "MB")
    table = Table("stream", "drafter", "nodes", "tokens/step", *names)
    for row in rows:
        times = (row.get(f"{what}_us", {"p50": "", "p99": ""}) for what in ("propose", "observe"))
        cells = (f"{time['p50']} / {time['p99']}" for time in times)
        accepted = " ".join(f"{share:.2f}" for share in row.get("accepted_per_position", [])[:5])
        start = (row["stream"], row["drafter"], str(row["nodes"]), f"{row['tokens_per_step']:.3f}")
        table.add_row(*start, *cells, accepted, str(row.get("memory_mb", "")))
    Console().print(table)


def draw(rows: Collection[dict[str, Any]], path: Path) -> None:
    """Tokens per step against the node budget, a panel per stream and a line per drafter, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    streams = list(dict.fromkeys(row["stream"] for row in rows))
    figure = Figure(figsize=(5 * len(streams), 4), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, stream in zip(np.atleast_1d(figure.subplots(1, len(streams), sharey=True)), streams, strict=True):
        mine = [row for row in rows if row["stream"] == stream]
        for name in dict.fromkeys(row["drafter"] for row in mine):
            points = [(row["nodes"], row["tokens_per_step"]) for row in mine if row["drafter"] == name]
            axes.plot(*zip(*points, strict=True), marker="o", label=name)
        axes.set(title=stream, xlabel="draft nodes a step", xscale="log")
        axes.grid(alpha=0.3)
    axes.legend()
    figure.axes[0].set_ylabel("tokens per step")
    figure.savefig(path, dpi=120)
