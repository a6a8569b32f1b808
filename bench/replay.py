"""`outrider bench replay`: drafters against recorded answers, without a model. Exact for greedy decoding.

A verifier would accept the draft tokens that agree with the recorded text, and each step emits a bonus token. Each line of a
stream is a new session that reads its own prompt, so nothing is learned across lines. The first token of an answer is a step
without a draft.
"""

from __future__ import annotations

import time
import tracemalloc
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import Progress

from bench import report
from bench.recordings import Line, Recordings, load_encoder, load_resources, load_stream
from outrider.drafters.interface import EMPTY, Drafter, Verdict
from outrider.drafters.options import DrafterName, Options
from outrider.drafters.registry import Resources, make, warm
from outrider.drafters.sequence import Sequence
from outrider.verify.acceptance import walk

REFERENCE = "REST's own run"
REFERENCE_NODES = 64
MAX_POSITIONS = 16  # draft positions whose acceptance is saved
PRINTED_POSITIONS = (1, 2, 3, 4, 6, 8, 12, 16)


@dataclass
class Tally:
    """One drafter over one stream at one node budget."""

    tokens: int = 0
    steps: int = 0
    propose_seconds: list[float] = field(default_factory=list)
    observe_seconds: list[float] = field(default_factory=list)
    memory_bytes: int = 0  # of one session's drafter
    accepted_at: Counter[int] = field(
        default_factory=Counter
    )  # draft position (from 1) to the number of steps that accepted it

    @property
    def tokens_per_step(self) -> float:
        """Emitted tokens per target forward."""
        return self.tokens / self.steps

    def figures(self) -> dict[str, Any]:
        """Tokens per step, microseconds, and the share of steps that accepted at least 1, 2, ... draft tokens."""
        totals = [p + o for p, o in zip(self.propose_seconds, self.observe_seconds, strict=True)]
        shares = [round(count / self.steps, 4) for _, count in sorted(self.accepted_at.items())]
        return {
            "tokens_per_step": round(self.tokens_per_step, 4),
            "steps": self.steps,
            "propose_us": report.microsecond_quantiles(self.propose_seconds),
            "observe_us": report.microsecond_quantiles(self.observe_seconds),
            "propose_and_observe_us": report.microsecond_quantiles(totals),
            "memory_mb": round(self.memory_bytes / 1e6, 2),
            "accepted_per_position": shares[:MAX_POSITIONS],
        }


def drafter_bytes(name: DrafterName, resources: Resources) -> int:
    """Memory that one session's drafter allocates; tables that sessions share are not included."""
    tracemalloc.start()
    try:
        drafter = make(name, resources)
        return tracemalloc.get_traced_memory()[0] if drafter else 0
    finally:
        tracemalloc.stop()


def replay(drafter: Drafter, line: Line, budget: int, tally: Tally) -> None:
    """Replays one recorded answer and adds it to `tally`."""
    sequence = Sequence(line.prompt)
    drafter.begin(sequence)
    answer, position = line.answer, 0
    padded = np.concatenate([answer, np.full(1 + budget, -1, np.int32)])  # -1 is no token, so drafts past the end are rejected
    while position < len(answer):
        started = time.perf_counter()
        tree = drafter.propose(budget) if position else EMPTY
        proposed = time.perf_counter()
        chosen = padded[np.concatenate([[0], tree.depths]) + position]
        rows, tokens = walk(tree, chosen.tolist().__getitem__)
        verdict = Verdict(tree, rows, tokens).cut(len(answer) - position)
        verified = time.perf_counter()
        sequence.append(verdict.tokens)
        drafter.observe(verdict)
        if position:
            tally.propose_seconds.append(proposed - started)
            tally.observe_seconds.append(time.perf_counter() - verified)
        position += len(verdict.tokens)
        tally.steps += 1
        tally.accepted_at.update(range(1, len(verdict.rows) + 1))
    tally.tokens += len(answer)
    drafter.end()


def run(
    recordings: Recordings,
    drafters: Collection[DrafterName],
    budgets: Collection[int],
    options: Options,
    out: Path | None,
    plot: Path | None,
) -> dict[str, Any]:
    """Replays every stream with every drafter at every node budget; prints, and saves if paths are given. Raises BenchError."""
    encoder = load_encoder(recordings.tokenizer)
    resources = load_resources(recordings.corpus, encoder, options)
    warm(resources)
    streams = {path.stem: load_stream(path, encoder, recordings.limit) for path in recordings.streams}
    rows: list[dict[str, Any]] = []
    with Progress() as progress:
        total = sum(len(lines) for lines, _ in streams.values()) * len(drafters) * len(budgets)
        task = progress.add_task("replaying", total=total)
        for stream, (lines, reference) in streams.items():
            if reference:
                row = {"drafter": REFERENCE, "nodes": REFERENCE_NODES, "tokens_per_step": round(reference, 4)}
                rows.append({"stream": stream, **row})
            for name in drafters:
                for budget in budgets:
                    tally = Tally(memory_bytes=drafter_bytes(name, resources))
                    for line in lines:
                        replay(make(name, resources), line, budget, tally)
                        progress.advance(task)
                    rows.append({"stream": stream, "drafter": name, "nodes": budget, **tally.figures()})
    figures = {
        "tokenizer": Path(recordings.tokenizer).name,
        "corpus": [path.name for path in recordings.corpus],
        "results": rows,
    }
    show(rows)
    if out:
        report.save(out, figures)
    if plot:
        draw(rows, plot)
    return figures


def show(rows: Collection[dict[str, Any]]) -> None:
    """Prints two tables per stream: speed, and acceptance by position."""
    for stream in dict.fromkeys(row["stream"] for row in rows):
        selected = [row for row in rows if row["stream"] == stream]
        print_speed(stream, selected)
        print_acceptance(stream, selected)


def print_speed(stream: str, rows: Collection[dict[str, Any]]) -> None:
    """Prints tokens per step and microseconds of one stream."""
    absent = {"p50": None, "p99": None}
    report.print_table(
        f"{stream}: speed",
        (
            *("drafter", "nodes", "tokens\nper step", "propose\nus p50", "propose\nus p99"),
            *("observe\nus p50", "observe\nus p99", "MB"),
        ),
        [
            (
                row["drafter"],
                row["nodes"],
                f"{row['tokens_per_step']:.3f}",
                *(row.get(f"{call}_us", absent)[share] for call in ("propose", "observe") for share in ("p50", "p99")),
                row.get("memory_mb"),
            )
            for row in rows
        ],
        "nodes: budget of a draft; us: microseconds; propose: drafting; observe: learning from "
        "the emitted tokens; MB: memory of one session.",
    )


def print_acceptance(stream: str, rows: Collection[dict[str, Any]]) -> None:
    """Prints the share of steps of one stream that accepted at least 1, 2, ... draft tokens."""
    drafted = [row for row in rows if row.get("accepted_per_position")]
    if not drafted:
        return
    report.print_table(
        f"{stream}: acceptance",
        ("drafter", "nodes", *map(str, PRINTED_POSITIONS)),
        [
            (
                row["drafter"],
                row["nodes"],
                *(
                    f"{row['accepted_per_position'][position - 1]:.2f}"
                    if position <= len(row["accepted_per_position"])
                    else None
                    for position in PRINTED_POSITIONS
                ),
            )
            for row in drafted
        ],
        "1, 2, ...: share of the steps that accepted at least that many draft tokens.",
    )


def draw(rows: Collection[dict[str, Any]], path: Path) -> None:
    """Plots tokens per step against the node budget as PNG: a panel per stream, a line per drafter."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    streams = list(dict.fromkeys(row["stream"] for row in rows))
    figure = Figure(figsize=(5 * len(streams), 4), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, stream in zip(np.atleast_1d(figure.subplots(1, len(streams), sharey=True)), streams, strict=True):
        selected = [row for row in rows if row["stream"] == stream]
        for name in dict.fromkeys(row["drafter"] for row in selected):
            points = [(row["nodes"], row["tokens_per_step"]) for row in selected if row["drafter"] == name]
            axes.plot(*zip(*points, strict=True), marker="o", label=name)
        axes.set(title=stream, xlabel="draft nodes per step", xscale="log")
        axes.grid(alpha=0.3)
    axes.legend()
    figure.axes[0].set_ylabel("tokens per step")
    figure.savefig(path, dpi=120)
