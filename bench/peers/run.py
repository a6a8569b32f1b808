"""`outrider bench peers`: Outrider beside transformers and llama.cpp, with the same weights, prompts, machine and threads."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.progress import Progress

from bench import report
from bench.peers import answers, shapes, tables
from bench.peers.answers import Choice
from bench.peers.levels import Levels
from bench.peers.peer import KINDS, install_command
from bench.peers.shapes import Shapes
from bench.plan import BenchError
from outrider.server.settings import load_settings, parse_flags

VERSIONS = ("llama-cpp-python", "gguf")


def make_levels(config: Path | None, flags: Sequence[str]) -> Levels:
    """The settings of the command line; without `model.threads`, all cores are used. Raises SettingsError or BenchError."""
    threads = load_settings(config, parse_flags(flags)).model.threads or os.cpu_count() or 1
    return Levels(config, flags, threads)


def parse_peers(text: str) -> list[str]:
    """Comma-separated names of peers; all of them for an empty text. Raises BenchError."""
    names = text.split(",") if text else list(answers.PEERS)
    if unknown := [name for name in names if name not in answers.PEERS]:
        raise BenchError(f"There is no peer {', '.join(unknown)}; choose from {', '.join(answers.PEERS)}.")
    return [name for name in answers.PEERS if name in names]


def parse_bits(text: str) -> list[int]:
    """Comma-separated numbers of bits. Raises BenchError."""
    bits = [int(item) if item.isdecimal() else 0 for item in text.split(",")]
    if not all(number in KINDS for number in bits):
        raise BenchError(f"--bits takes some of {', '.join(map(str, KINDS))}, separated by commas, not {text!r}.")
    return bits


def run(levels: Levels, choice: Choice, shaped: Shapes, out: Path | None, plot: Path | None) -> dict[str, Any]:
    """Measures, prints, and saves the figures and the plot if paths are given. Raises BenchError.

    Peers that are not installed are left out, and named with the command that installs them.
    """
    missing = {name: command for name in choice.peers if (command := install_command(answers.PEERS[name].packages))}
    installed = [name for name in choice.peers if name not in missing]
    if not installed:
        raise BenchError(f"None of the peers is installed: {'; '.join(dict.fromkeys(missing.values()))}.")
    choice = replace(choice, peers=installed)
    shaped = replace(shaped, peers=[name for name in installed if name in shapes.PEERS])
    material = shapes.load_material(shaped, levels)  # before minutes of measuring, for its errors
    with tempfile.TemporaryDirectory(prefix="outrider-peers-") as folder, Progress() as progress:
        figures: dict[str, Any] = {
            "threads": levels.threads,
            "prompts": len(choice.plan.prompts),
            "max_tokens": choice.plan.max_tokens,
            "versions": {name: installed_version(name) for name in VERSIONS},
            "not_installed": missing,
            "answers": answers.measure(choice, levels, Path(folder), progress),
            **shapes.measure_shapes(shaped, material, levels, Path(folder), progress),
        }
    tables.show(figures)
    if out:
        report.save(out, figures)
    if plot:
        tables.draw(figures, plot)
    return figures


def installed_version(package: str) -> str | None:
    """The version of a package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
