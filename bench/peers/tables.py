"""The figures of `outrider bench peers` as tables of 80 columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from bench import report

ROWS = (1, 8, 16)  # of the steps that are timed
REPLAY = {
    "bits": "bits",
    "program": "peer",
    "method": "method",
    "tokens/s": "tokens_per_second:.1f",
    "tokens\nper step": "tokens_per_step:.2f",
    "over\nplain": "over_plain:.2f",
    "over\nbest": "over_best_peer:.2f",
}
LEGEND = (
    "over: medians over the answers of the ratio of tokens/s, to the same program's without drafts, and to llama.cpp's best."
)


def show(figures: Mapping[str, Any]) -> None:
    """Prints two tables per shape, and what is not installed."""
    for shape in dict.fromkeys(row["shape"] for row in figures["steps"]):
        replayed, steps = ([row for row in figures[name] if row["shape"] == shape] for name in ("replay", "steps"))
        if replayed:
            report.print_figures(f"{shape}: forced replay, {figures['threads']} threads", REPLAY, replayed, LEGEND)
        columns = {"bits": "bits", "program": "peer"} | {f"{rows}": f"rows_{rows}_ms:.1f" for rows in ROWS}
        report.print_figures(f"{shape}: milliseconds of a step, by rows", columns, steps)
    console = Console(highlight=False, markup=False)
    for name, command in figures["not_installed"].items():
        console.print(f"{name} is not installed: {command}")
