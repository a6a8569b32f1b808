"""The figures of `outrider bench peers` as tables of 80 columns, and as a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from bench import report
from bench.ablations.plots import new_figure
from bench.peers.shapes import ROWS

RATIOS = {"over\nllama.cpp": "over_llama_plain:.2f", "over its\nlookup": "over_llama_lookup:.2f"}
SPEED = {"bits": "bits", "peer": "peer", "method": "method", "tokens/s": "tokens_per_second:.1f", **RATIOS}
PER_STEP = {"tokens\nper step": "tokens_per_step:.2f"}
LEGEND = "over: tokens/s divided by those of llama.cpp, and of llama.cpp with its own n-gram drafts, of the same repeat."
BAR_WIDTH = 0.8  # of all bars of one number of bits


def show(figures: Mapping[str, Any]) -> None:
    """Prints a table of answers per transport and temperature, those of shapes, and what is not installed."""
    for title, rows in panels(figures):
        first = rows[0]["peer"], rows[0]["method"]
        same = {"same\ntokens": "same_tokens_as_first"} if "same_tokens_as_first" in rows[0] and "shape" not in rows[0] else {}
        steps = PER_STEP if "tokens_per_step" in rows[0] else {}
        legend = LEGEND + (f" same tokens: answers equal to those of {' '.join(first)} in as many bits." if same else "")
        report.print_figures(f"{title}, {figures['threads']} threads", {**SPEED, **steps, **same}, rows, legend)
    for shape in dict.fromkeys(row["shape"] for row in figures["steps"]):
        columns = {"bits": "bits", "peer": "peer"} | {f"{rows}": f"rows_{rows}_ms:.1f" for rows in ROWS}
        rows = [row for row in figures["steps"] if row["shape"] == shape]
        report.print_figures(f"{shape}: milliseconds of a step, by rows", columns, rows)
    console = Console(highlight=False, markup=False)
    for name, command in figures["not_installed"].items():
        console.print(f"{name} is not installed: {command}")


def panels(figures: Mapping[str, Any]) -> list[tuple[str, Sequence[Mapping[str, Any]]]]:
    """Titles and rows whose speeds may be compared."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in figures["answers"]:
        where = row["transport"].capitalize() if row["transport"] != "HTTP" else "Over HTTP"
        groups.setdefault(f"{where}, temperature {row['temperature']:g}", []).append(row)
    for row in figures["replay"]:
        groups.setdefault(f"{row['shape']}, forced replay", []).append(row)
    return list(groups.items())


def draw(figures: Mapping[str, Any], path: Path) -> None:
    """Plots tokens per second as PNG: a panel per table, a group of bars per number of bits, a colour per contender."""
    groups = panels(figures)
    figure = new_figure(5 * len(groups), 4)
    for index, (title, rows) in enumerate(groups):
        axes = figure.add_subplot(1, len(groups), index + 1)
        bits = list(dict.fromkeys(row["bits"] for row in rows))
        names = list(dict.fromkeys(f"{row['peer']}, {row['method']}" for row in rows))
        width = BAR_WIDTH / len(names)
        for place, name in enumerate(names):
            speeds = {row["bits"]: row["tokens_per_second"] for row in rows if f"{row['peer']}, {row['method']}" == name}
            heights = [speeds.get(number, np.nan) for number in bits]
            axes.bar(np.arange(len(bits)) + place * width, heights, width, label=name)
        axes.set_xticks(np.arange(len(bits)) + (BAR_WIDTH - width) / 2, [f"{number} bits" for number in bits])
        axes.set(title=title, ylabel="tokens per second")
        axes.grid(axis="y", alpha=0.3)
        axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
