"""Results: printed as tables of at most 80 columns, saved as JSON with their provenance."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from outrider.verify.findings import processor_name

RESULTS = Path(__file__).parent / "results"
# This is printed for a figure that is missing in a row.
ABSENT = "-"


def print_table(title: str, headers: Sequence[str], rows: Sequence[Sequence[Any]], legend: str = "") -> None:
    """Prints a table with a title, units in the headers, and a legend. Cells never wrap; numbers are aligned right."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    cells = [[ABSENT if value is None else str(value) for value in row] for row in rows]
    for index, header in enumerate(headers):
        numeric = all(row[index][:1].isdigit() or row[index][:1] == ABSENT for row in cells)
        table.add_column(header, justify="right" if numeric else "left", no_wrap=True, vertical="bottom")
    for row in cells:
        table.add_row(*row)
    console = Console(highlight=False, markup=False)
    console.print(f"\n{title}", table, sep="\n")
    if legend:
        console.print(legend)


def print_figures(title: str, columns: Mapping[str, str], rows: Sequence[Mapping[str, Any]], legend: str = "") -> None:
    """Prints one line per row; `columns` maps headers to figures with an optional format, such as "tokens_per_step:.3f"."""
    figures = [column.partition(":")[::2] for column in columns.values()]
    cells = [[format(row[name], spec) if name in row else None for name, spec in figures] for row in rows]
    print_table(title, tuple(columns), cells, legend)


def quantiles(values: Sequence[float], unit: float = 1e3) -> dict[str, float]:
    """p50, p90, p99 and maximum; `unit` converts seconds to milliseconds."""
    if not values:
        return {}
    ordered = sorted(values)
    picked = {f"p{share}": ordered[min(len(ordered) - 1, len(ordered) * share // 100)] for share in (50, 90, 99)}
    return {name: round(unit * value, 2) for name, value in (picked | {"max": ordered[-1]}).items()}


def save(path: Path, figures: Mapping[str, Any]) -> None:
    """Writes the figures and their provenance as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**provenance(), **figures}, indent=1) + "\n")


def provenance() -> dict[str, Any]:
    """Command, machine, commit, date and versions, to repeat a run."""
    return {
        "command": command(sys.orig_argv),
        "machine": machine(),
        "commit": commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "python": platform.python_version(),
        **{name: found for name in ("torch", "transformers") if (found := installed_version(name))},
    }


def installed_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def command(words: Sequence[str]) -> str:
    """The command line of a process, from `sys.orig_argv`, without folders: of a module, or of a script."""
    program = ["python", "-m"] if words[1] == "-m" else []
    script, *arguments = words[2:] if program else words[1:]
    return " ".join([*program, Path(script).name, *map(without_folder, arguments)])


def without_folder(argument: str) -> str:
    """Reduces the path of a file outside the current folder to its name; other arguments stay as they are."""
    path = Path(argument)
    return path.name if path.exists() and (path.is_absolute() or ".." in path.parts) else argument


def machine() -> str:
    """Name of the GPU or the processor, and the number of CPU cores."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()} ({os.cpu_count()} CPU cores)"
    return f"{processor_name()}, {os.cpu_count()} cores"


def commit() -> str:
    """The checkout's commit, with "-dirty" if the code differs from it; "unknown" outside a checkout."""
    root = Path(__file__).parent.parent
    try:
        name = git(root, "rev-parse", "--short=12", "HEAD")
        return name + ("-dirty" if git(root, "status", "--porcelain", "--", ".", ":!bench/results") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def git(root: Path, *arguments: str) -> str:
    """The stripped output of a git command in `root`."""
    return subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True).stdout.strip()
