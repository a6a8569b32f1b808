"""`outrider bench datastore`: builds a suffix datastore and measures what it takes: memory, opening, answering, residence."""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench import report
from bench.decode import BenchError, read_prompts
from drafters.fusion import FusionDrafter
from drafters.interface import Drafter, Ints, Verdict
from drafters.options import FusionOptions, RetrievalOptions
from drafters.retrieval import RetrievalDrafter
from drafters.sequence import Sequence
from drafters.tables import datastore
from drafters.tables.ngram import empty_base
from drafters.tables.suffix import index
from verify.tokenizer import fingerprint, load_tokenizer

NODES = 64
STRIDE = 4  # tokens between two questions about one prompt


def run(paths: Collection[Path], tokenizer: str, prompts: Path, limit: int | None, out: Path | None) -> dict[str, Any]:
    """Builds in a process of its own, then asks what follows the prompts' texts. Raises BenchError."""
    loaded = load_tokenizer(tokenizer)
    texts = [np.array(loaded.encode(prompt), np.int32) for prompt in read_prompts(prompts, limit)]
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        figures = build(paths, tokenizer, store)
        figures |= ask(store, fingerprint(loaded), len(loaded), texts)
    show(figures)
    if out:
        report.save(out, figures)
    return figures


def build(paths: Collection[Path], tokenizer: str, store: Path) -> dict[str, Any]:
    """`outrider datastore build`, its time and its peak memory. Raises BenchError."""
    command = [sys.executable, "-m", "server.cli", "datastore", "build", "--kind", "suffix"]
    started = time.perf_counter()
    done = subprocess.run([*command, "--tokenizer", tokenizer, "--out", str(store), *map(str, paths)])
    if done.returncode:
        raise BenchError("The datastore was not built.")
    seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024
    described = datastore.describe(store)
    return {
        "tokens": described.tokens,
        "blocks": described.blocks,
        "megabytes": round(described.bytes / 1e6, 1),
        "build_seconds": round(seconds, 1),
        "build_peak_memory_mb": peak,
    }


def ask(store: Path, mark: str, vocabulary: int, texts: list[Ints]) -> dict[str, Any]:
    """Opens the datastore and drafts from it at many places of the texts."""
    blocks = len(datastore.block_paths(store))
    small = [index(np.tile(texts[0].astype(np.int64), 2), vocabulary)] * blocks
    for drafter in drafters(small, vocabulary):  # compiles the kernels, which takes memory of its own
        microseconds(drafter, texts[:1])
    before = resident_megabytes()
    started = time.perf_counter()
    corpus = datastore.load(store, mark)
    opened = time.perf_counter() - started
    found: dict[str, Any] = {"open_seconds": round(opened, 4)}
    for name, drafter in zip(("retrieval", "fusion"), drafters(corpus, vocabulary), strict=True):
        times, most = microseconds(drafter, texts)
        quantiles = statistics.quantiles(times, n=100)
        found[name] = {
            "questions": len(times),
            "propose_and_observe_us": {"p50": round(quantiles[49], 1), "p99": round(quantiles[98], 1)},
            "resident_growth_mb": round(resident_megabytes() - before, 1),
            "resident_growth_while_answering_mb": round(most - before, 1),
        }
    return found


def drafters(corpus: Collection[Any], vocabulary: int) -> tuple[Drafter, Drafter]:
    """The two that read a datastore."""
    return (
        RetrievalDrafter(corpus, RetrievalOptions()),
        FusionDrafter(empty_base(), corpus, FusionOptions(), vocabulary + 1),
    )


def microseconds(drafter: Drafter, texts: list[Ints]) -> tuple[list[float], float]:
    """Time of each step, the texts taken as answers that are read STRIDE tokens at a time, and the most memory resident."""
    times, most = [], 0.0
    for text in texts:
        sequence = Sequence(text[:STRIDE])
        drafter.begin(sequence)
        for at in range(STRIDE, len(text) - STRIDE, STRIDE):
            started = time.perf_counter()
            tree = drafter.propose(NODES)
            sequence.append(text[at : at + STRIDE])
            drafter.observe(Verdict(tree, np.empty(0, np.int32), text[at : at + STRIDE]))
            times.append(1e6 * (time.perf_counter() - started))
        most = max(most, resident_megabytes())
        drafter.end()
    return times, most


def resident_megabytes() -> float:
    """What the process holds in memory now, mapped files included."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) / 1e3


def show(figures: dict[str, Any]) -> None:
    """The figures as a table."""
    table = Table("figure", "value")
    for name, value in figures.items():
        table.add_row(name.replace("_", " "), str(value))
    Console().print(table)
