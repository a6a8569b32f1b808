"""Measures ablations, saves each one when it is done, and prints tables. An interrupted run continues where it stopped."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.progress import Progress

from bench import report
from bench.ablations import aded, gsd, pearl, rest
from bench.ablations.material import Material, Recordings
from bench.ablations.page import cell, columns_of
from bench.ablations.size import Row, Size
from bench.ablations.study import Ablation, Case
from bench.plan import BenchError

ABLATIONS: tuple[Ablation, ...] = (*aded.ABLATIONS, *rest.ABLATIONS, *gsd.ABLATIONS, *pearl.ABLATIONS)
RESULTS = "ablations.json"


def choose(only: str | None, has_recordings: bool) -> list[Ablation]:
    """The ablations to measure; `only` holds names separated by commas. Raises BenchError."""
    names = only.split(",") if only else [ablation.name for ablation in ABLATIONS]
    known = {ablation.name for ablation in ABLATIONS}
    if unknown := [name for name in names if name not in known]:
        raise BenchError(f"There is no ablation {', '.join(unknown)}; choose from {', '.join(sorted(known))}.")
    chosen = [each for each in ABLATIONS if each.name in names and (has_recordings or not each.needs_recordings)]
    if not chosen:
        raise BenchError("These ablations need recorded answers; give --chat, --code, --corpus and --tokenizer.")
    return chosen


def run(size: Size, recordings: Recordings | None, chosen: Sequence[Ablation], out: Path, again: bool = False) -> Row:
    """Measures the chosen ablations that the folder `out` does not have, or all of them with `again`; prints."""
    done = saved(out / RESULTS, size)
    material = Material(size, recordings)
    with Progress() as progress:
        task = progress.add_task("measuring", total=sum(len(ablation.cases) for ablation in chosen))
        for ablation in chosen:
            progress.update(task, description=ablation.name)
            if ablation.name in done and not again:
                progress.advance(task, len(ablation.cases))
                continue
            rows = []
            for case in ablation.cases:
                rows.append(measured(case, material))
                progress.advance(task)
            done[ablation.name] = described(ablation, rows)
            save(out / RESULTS, size, done)
    results = {ablation.name: done[ablation.name] for ablation in chosen}
    for name, result in results.items():
        show(name, result)
    return results


def measured(case: Case, material: Material) -> dict[str, Any]:
    """The row of a case."""
    figures = {name: round(value, 4) if isinstance(value, float) else value for name, value in case.measure(material).items()}
    return {**case.labels, **figures, **case.published}


def described(ablation: Ablation, rows: Sequence[Row]) -> dict[str, Any]:
    """The rows of an ablation, with what a page needs to show them."""
    shown = {name: getattr(ablation, name) for name in ("paper", "title", "claim", "wide")}
    return {**shown, "commit": report.commit(), "date": datetime.now(UTC).date().isoformat(), "rows": rows}


def saved(path: Path, size: Size) -> dict[str, Any]:
    """The ablations in a file, by name; empty if they have another size."""
    if not path.exists():
        return {}
    results = json.loads(path.read_text())
    return dict(results["ablations"]) if results["size"] == asdict(size) else {}


def save(path: Path, size: Size, done: Mapping[str, Any]) -> None:
    """Writes the ablations in the order of the papers."""
    ordered = {ablation.name: done[ablation.name] for ablation in ABLATIONS if ablation.name in done}
    report.save(path, {"size": asdict(size), "ablations": ordered})


def show(name: str, result: Mapping[str, Any]) -> None:
    """Prints one ablation."""
    columns = columns_of(result["rows"])
    rows = [[cell(row.get(column)) or None for column in columns] for row in result["rows"]]
    report.print_table(f"{name}: {result['title']}", [column.replace(", ", ",\n") for column in columns], rows)
