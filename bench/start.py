"""`outrider bench start`: seconds until a server is ready and memory at the peak, of first and later starts.

A first start packs the weights and writes them to a folder, which later starts map. Here, that is a new one in
`model.packed_folder`.
"""

import re
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.progress import Progress

from bench import report
from bench.http.process import ServerProcess, children, start_server
from bench.plan import BenchError
from outrider import models
from outrider.server.settings import load_settings, parse_flags

ANSWER = {"prompt": "def fibonacci(n):", "max_tokens": 24, "temperature": 0}
# Sizes of a process, of the front end and of the worker; pages of files that are mapped are counted.
FIELDS = {
    "peak_mb": ("status", "VmHWM"),
    "resident_mb": ("status", "VmRSS"),
    "private_mb": ("status", "RssAnon"),
    "shared_mb": ("smaps_rollup", "Shared_Clean"),
}
SECONDS = ("ready_s", "first_answer_s", "second_answer_s")
HEADERS = ("start", "ready, s", "answer, s", "second, s", "peak, MB", "/ file", "less empty", "/ file")
# Seconds until the disk has what a first start writes.
MOST_SECONDS = 120


def run(files: Sequence[Path], turns: int, flags: Sequence[str], out: Path | None) -> None:
    """Measures, prints, and saves the figures if `out` is given. Raises BenchError."""
    if missing := [str(each) for each in files if not each.is_file()]:
        raise BenchError(f"there is no file {missing[0]}")
    place = load_settings(None, parse_flags(flags)).model.packed_folder or Path(tempfile.gettempdir())
    place.expanduser().mkdir(mode=0o700, parents=True, exist_ok=True)
    found: dict[str, dict[str, Any]] = {}
    with Progress() as progress:
        task = progress.add_task("Starts", total=1 + 2 * turns * len(files))
        empty = started(Path(models.TARGET), flags)  # what Python and its modules take
        progress.advance(task)
        for file in files:
            runs: dict[str, list[dict[str, Any]]] = {"first": [], "later": []}
            for _ in range(turns):
                with tempfile.TemporaryDirectory(dir=place.expanduser()) as folder:
                    for each in runs.values():
                        each.append(started(file, [*flags, "--model.packed_folder", folder], Path(folder)))
                        progress.advance(task)
            found[file.name] = {"file_mb": max(1, round(file.stat().st_size / 1e6)), **runs}
            if out:
                report.save(out, {"turns": turns, "empty": empty, "files": found})
    for name, figures in found.items():
        rows = [shown(kind, figures, empty) for kind in ("first", "later")]
        report.print_table(f"{name}, {figures['file_mb']} MB", HEADERS, rows)
    print(f"\nMedians of {turns}. The peaks of both processes are added, what both map once.")
    print(f"An empty server, with the embedded model, peaks at {peak_of(empty)} MB.")


def shown(kind: str, file: dict[str, Any], empty: dict[str, Any]) -> list[Any]:
    """A row of the table: medians of a file's first or later starts."""
    seconds = [statistics.median(each[name] for each in file[kind]) for name in SECONDS]
    peak = statistics.median(map(peak_of, file[kind]))
    rest = peak - peak_of(empty)
    return [kind, *seconds, round(peak), f"{peak / file['file_mb']:.2f}", round(rest), f"{rest / file['file_mb']:.2f}"]


def started(model: Path, flags: Sequence[str], folder: Path | None = None) -> dict[str, Any]:
    """Figures of one start, which ends when the folder's file is complete. Raises BenchError."""
    with start_server(["--model.path", str(model), *flags]) as server:
        ready = time.perf_counter() - server.started
        name = server.client.get("/v1/models").json()["data"][0]["id"]
        (first, text), (second, _) = (answer(server, name) for _ in range(2))
        end = time.perf_counter() + MOST_SECONDS
        while folder and any(folder.glob("*.partial")) and time.perf_counter() < end:
            time.sleep(0.1)
        processes = [server.process.pid, *children(server.process.pid)]
        memory = {name: [megabytes(each, *field) for each in processes] for name, field in FIELDS.items()}
    return {**dict(zip(SECONDS, (round(ready, 2), first, second), strict=True)), **memory, "text": text}


def answer(server: ServerProcess, model: str) -> tuple[float, str]:
    """Seconds of an answer, and its text. Raises BenchError."""
    sent = time.perf_counter()
    response = server.client.post("/v1/completions", json={"model": model, **ANSWER})
    if response.status_code != 200:
        raise BenchError(f"the server answered {response.status_code}: {response.text[:200]}")
    return round(time.perf_counter() - sent, 2), response.json()["choices"][0]["text"]


def megabytes(process: int, file: str, field: str) -> int:
    """A size in /proc/PID/FILE, in units of 10^6 bytes."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path(f"/proc/{process}/{file}").read_text())
    return round(int(found[1]) * 1024 / 1e6) if found else 0


def peak_of(run: dict[str, Any]) -> int:
    """The sum of both processes' peaks; the libraries that both map count once."""
    return int(sum(run["peak_mb"]) - min(run["shared_mb"]))
