"""Memory of a server's processes over a run, and what a run must show of it and of `GET /health`."""

import re
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.http.process import children

PROGRAM = re.compile(rb"outrider\.server\.(worker|\w+\.\w*(?:indexer|encod|process|prepar|validator)\w*|encoders|pictures)")
SETTLING_SECONDS = 60.0  # the memory of a process counts after this time
MAX_GROWTH = 1.1  # the last quarter's median over the first quarter's, once the stores are full


class Sample(NamedTuple):
    """Memory of a process at one time."""

    seconds: float  # from the start
    process_id: int
    mb: float


class Memory:
    """Samples by the name of a process."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self.samples: defaultdict[str, list[Sample]] = defaultdict(list)

    def sample(self, processes: Iterable[tuple[str, int]]) -> None:
        """Notes the memory of processes by name and id; those of one name are added up."""
        used: Counter[str] = Counter()
        ids = {}
        for name, process in processes:
            if mb := resident_mb(process):
                used[name] += int(mb)
                ids[name] = process
        for name, mb in used.items():
            self.samples[name].append(Sample(time.perf_counter() - self._started, ids[name], mb))

    def growth(self, full_at: float) -> dict[str, dict[str, float]]:
        """`growth` by the name of a process."""
        return {name: growth(samples, full_at) for name, samples in self.samples.items()}


def resident_mb(process_id: int) -> float:
    """Resident memory of a process in MiB, without pages of mapped files. 0 if it has ended."""
    try:
        status = Path(f"/proc/{process_id}/status").read_text()
    except OSError:
        return 0.0
    match = re.search(r"RssAnon:\s+(\d+) kB", status)
    return int(match[1]) / 1024 if match else 0.0


def processes_of(server_id: int) -> Iterator[tuple[str, int]]:
    """A server's processes, by what they do."""
    yield "front end", server_id
    for child in children(server_id):
        try:
            found = PROGRAM.search(Path(f"/proc/{child}/cmdline").read_bytes())
        except OSError:
            continue
        if found:  # otherwise it is about to start
            yield found[1].decode(), child


def growth(samples: Sequence[Sample], full_at: float) -> dict[str, float]:
    """Median memory of the last process in the first and the last quarter of its time.

    The time before `full_at` seconds, when the stores are full, and the process's first SETTLING_SECONDS do not count.
    """
    last = [sample for sample in samples if sample.process_id == samples[-1].process_id]
    start = max(full_at, last[0].seconds + SETTLING_SECONDS)
    settled = [sample.mb for sample in last if sample.seconds > start] or [sample.mb for sample in last]
    quarter = max(1, len(settled) // 4)
    early, late = statistics.median(settled[:quarter]), statistics.median(settled[-quarter:])
    return {"early_mb": round(early, 1), "late_mb": round(late, 1), "ratio": round(late / early, 4)}


def failed_criteria(memory: dict[str, dict[str, float]], figures: dict[str, Any], max_health_ms: float) -> list[str]:
    """One sentence for each process whose memory grew, and one if `GET /health` was slow or failed."""
    failed = [
        f"The memory of {name} grew from {each['early_mb']} to {each['late_mb']} MB."
        for name, each in memory.items()
        if each["ratio"] > MAX_GROWTH
    ]
    if figures["health_ms"]["p99"] > max_health_ms or figures["health_failures"]:
        failed.append(f"/health took {figures['health_ms']['p99']} ms at p99, and failed {figures['health_failures']} times.")
    return failed
