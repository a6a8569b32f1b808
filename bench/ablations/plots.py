"""Plots of ablations: a page of panels per paper, and one graph of GSD."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from bench.ablations.decoding import merged, tree_of
from bench.ablations.gsd import run
from bench.ablations.material import Material
from bench.ablations.study import PAPERS
from outrider.drafters.interface import DraftTree, Source

COLUMNS = 3  # panels side by side


def new_figure(width: float, height: float, layout: Literal["constrained"] | None = "constrained") -> Any:
    """An empty figure that is drawn without a display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout=layout)
    FigureCanvasAgg(figure)
    return figure


def draw(results: Mapping[str, Any], folder: Path) -> None:
    """Plots the results (by name) that are to be plotted, as `ablations-PAPER.png`."""
    for paper, title in PAPERS.items():
        panels = [result for result in results.values() if result["paper"] == paper and result["plotted"]]
        if panels:
            rows = -(-len(panels) // COLUMNS)
            figure = new_figure(4.5 * COLUMNS, 3.2 * rows)
            figure.suptitle(title)
            for index, result in enumerate(panels):
                draw_panel(figure.add_subplot(rows, COLUMNS, index + 1), result)
            figure.savefig(folder / f"ablations-{paper}.png", dpi=100)


def draw_panel(axes: Any, result: Mapping[str, Any]) -> None:
    """One ablation: a line per plotted column over the first label."""
    rows = result["rows"]
    label = next(iter(rows[0]))
    ticks = [f"{row[label]:.3g}" if isinstance(row[label], float) else str(row[label]) for row in rows]
    for column in result["plotted"]:
        axes.plot(range(len(rows)), [np.nan if row[column] is None else row[column] for row in rows], marker="o", label=column)
    axes.set_xticks(range(len(rows)), ticks, rotation=30 if max(map(len, ticks)) > 4 else 0, fontsize=8)
    axes.set(title=result["title"], xlabel=label)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def draw_graph(material: Material, path: Path) -> None:
    """Figure 6 of GSD: the draft with the most accepted merged nodes. Accepted nodes are framed, merged nodes are blue."""
    steps = run(material, "GSD").steps
    step = max(steps, key=lambda step: (merged(step), int((tree_of(step).source == Source.MERGED).sum())))
    tree = tree_of(step)
    places = positions(tree)
    depth = max(1, int(tree.depths.max(initial=1)))
    figure = new_figure(1.5 * depth + 2, 0.25 * max(12, len(places)), None)
    axes = figure.add_axes((0.05, 0.02, 0.9, 0.96))
    axes.axis("off")
    accepted = set(step.accepted.tolist())
    for row, (x, y) in places.items():
        above = places.get(int(tree.parents[row]), (0.0, 0.0))
        axes.plot([above[0], x], [above[1], y], color="lightgrey", zorder=0)
        color = "tab:blue" if tree.source[row] == Source.MERGED else "tab:red"
        frame = {"boxstyle": "round", "facecolor": "white", "edgecolor": "black" if row in accepted else "white", "pad": 0.2}
        axes.text(x, y, repr(material.text([int(tree.tokens[row])])), color=color, fontsize=7, ha="center", bbox=frame)
    figure.savefig(path, dpi=100)


def positions(tree: DraftTree) -> dict[int, tuple[float, float]]:
    """A place of each node: its depth, and a line of its own for each leaf, between which its ancestors stand."""
    places: dict[int, tuple[float, float]] = {}
    leaves = 0
    for row in range(len(tree) - 1, -1, -1):  # children before their parents
        below = [places[child][1] for child in np.flatnonzero(tree.parents == row).tolist()]
        if not below:
            leaves += 1
        places[row] = (float(tree.depths[row]), float(np.mean(below)) if below else float(leaves))
    return places
