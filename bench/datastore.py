"""`outrider bench datastore`: time and memory to build, open and query a suffix datastore."""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from bench import report
from bench.plan import BenchError, read_prompts
from outrider.drafters.fusion import FusionDrafter
from outrider.drafters.interface import Drafter, Ints, Verdict
from outrider.drafters.options import FusionOptions, RetrievalOptions
from outrider.drafters.retrieval import RetrievalDrafter
from outrider.drafters.sequence import Sequence
from outrider.drafters.tables import datastore
from outrider.drafters.tables.ngram import empty_base
from outrider.drafters.tables.suffix import Corpus, index
from outrider.verify.tokenizer import fingerprint, load_tokenizer

DRAFTERS = ("retrieval", "fusion")
FIGURES = {  # name to printed label
    "tokens": "tokens",
    "blocks": "blocks",
    "megabytes": "size (MB)",
    "build_seconds": "building (s)",
    "build_peak_memory_mb": "peak memory of building (MB)",
    "open_seconds": "opening (s)",
}
NODES = 64
STRIDE = 4  # tokens per step


def run(paths: Collection[Path], tokenizer: str, prompts: Path, limit: int | None, out: Path | None) -> dict[str, Any]:
    """Builds a datastore in another process, then drafts continuations of the prompts. Raises BenchError."""
    encoder = load_tokenizer(tokenizer)
    texts = [np.array(encoder.encode(prompt), np.int32) for prompt in read_prompts(prompts, limit)]
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        figures = build(paths, tokenizer, store)
        figures |= query(store, fingerprint(encoder), len(encoder), texts)
    show(figures)
    if out:
        report.save(out, figures)
    return figures


def build(paths: Collection[Path], tokenizer: str, store: Path) -> dict[str, Any]:
    """Runs `outrider datastore build`; returns its figures, time and peak memory. Raises BenchError."""
    command = [sys.executable, "-m", "outrider.server.cli", "datastore", "build", "--kind", "suffix"]
    started = time.perf_counter()
    completed = subprocess.run([*command, "--tokenizer", tokenizer, "--out", str(store), *map(str, paths)])
    if completed.returncode:
        raise BenchError("Building the datastore failed; see the message above.")
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


def query(store: Path, tokenizer_fingerprint: str, vocabulary: int, texts: list[Ints]) -> dict[str, Any]:
    """Opens the datastore and drafts from it at many positions of the texts."""
    blocks = len(datastore.block_paths(store))
    small = [index(np.tile(texts[0].astype(np.int64), 2), vocabulary)] * blocks
    for drafter in make_drafters(small, vocabulary):  # compiles the kernels, which takes memory too
        step_seconds(drafter, texts[:1])
    initial_mb = resident_mb()
    started = time.perf_counter()
    corpus = datastore.load(store, tokenizer_fingerprint)
    figures: dict[str, Any] = {"open_seconds": round(time.perf_counter() - started, 4)}
    for name, drafter in zip(DRAFTERS, make_drafters(corpus, vocabulary), strict=True):
        times, peak_mb = step_seconds(drafter, texts)
        figures[name] = {
            "questions": len(times),
            "propose_and_observe_us": report.microsecond_quantiles(times),
            "resident_growth_mb": round(resident_mb() - initial_mb, 1),
            "resident_growth_while_answering_mb": round(peak_mb - initial_mb, 1),
        }
    return figures


def make_drafters(corpus: Collection[Corpus], vocabulary: int) -> tuple[Drafter, Drafter]:
    """The two drafters that read a datastore, in the order of DRAFTERS."""
    return (
        RetrievalDrafter(corpus, RetrievalOptions()),
        FusionDrafter(empty_base(), corpus, FusionOptions(), vocabulary + 1),
    )


def step_seconds(drafter: Drafter, texts: list[Ints]) -> tuple[list[float], float]:
    """Seconds of each step that reads STRIDE tokens of a text, and the peak of resident memory in MB."""
    times, peak_mb = [], 0.0
    for text in texts:
        sequence = Sequence(text[:STRIDE])
        drafter.begin(sequence)
        for start in range(STRIDE, len(text) - STRIDE, STRIDE):
            started = time.perf_counter()
            tree = drafter.propose(NODES)
            emitted = text[start : start + STRIDE]
            sequence.append(emitted)
            drafter.observe(Verdict(tree, np.empty(0, np.int32), emitted))
            times.append(time.perf_counter() - started)
        peak_mb = max(peak_mb, resident_mb())
        drafter.end()
    return times, peak_mb


def resident_mb() -> float:
    """Resident memory of this process in MB, mapped files included."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) / 1e3


def show(figures: dict[str, Any]) -> None:
    """Prints two tables: the datastore, and its queries."""
    report.print_table("Datastore", ("figure", "value"), [(label, figures[name]) for name, label in FIGURES.items()])
    queries = [(name, figures[name]) for name in DRAFTERS]
    report.print_table(
        f"Steps of {NODES} draft nodes",
        ("drafter", "steps", "us p50", "us p99", "final\ngrowth MB", "peak\ngrowth MB"),
        [
            (
                name,
                row["questions"],
                *row["propose_and_observe_us"].values(),
                row["resident_growth_mb"],
                row["resident_growth_while_answering_mb"],
            )
            for name, row in queries
        ],
        "us: drafting and learning from the emitted tokens; growth: of resident memory, from before the datastore was opened.",
    )
