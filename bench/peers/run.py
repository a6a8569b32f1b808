"""`outrider bench peers`: Outrider beside llama.cpp in process, with the same random weights, machine and threads.

Measures the time of a step by its rows, and forced replay of recorded answers.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.progress import Progress

from bench import report
from bench.figures import figures, record
from bench.model.forced import context_of, load_replay
from bench.model.gguf_file import write
from bench.model.shapes import SHAPES, check_shape, random_runner
from bench.peers import tables
from bench.peers.contenders import LLAMA, PEERS, RandomWeights, ShapePeer
from bench.plan import BenchError
from bench.recordings import Line, Recordings
from bench.turns import contenders, count_items, install_command, installed_version, take_turns
from outrider.drafters.registry import Resources
from outrider.server.settings import Settings, load_settings, parse_flags

VERSIONS = ("llama-cpp-python", "gguf")
ROUNDS, STEPS_IN_TURN = 15, 4


class Kind(NamedTuple):
    """How programs name weights of some number of bits."""

    dtype: str  # model.dtype
    quantize: str  # model.quantize
    gguf: str  # type of the tensors in a GGUF file


KINDS = {
    32: Kind("float32", "none", "F32"),
    16: Kind("bfloat16", "none", "BF16"),
    8: Kind("bfloat16", "int8", "Q8_0"),
    4: Kind("bfloat16", "int4", "Q4_0"),
}


@dataclass(frozen=True)
class Choice:
    """What is measured."""

    shapes: Sequence[str]  # in SHAPES
    bits: Sequence[int]  # in KINDS
    peers: Sequence[str]  # names in PEERS
    drafters: Sequence[str]
    recordings: Recordings | None  # None measures steps only
    max_tokens: int  # per answer
    repeats: int

    def __post_init__(self) -> None:
        """Raises BenchError for an unknown shape, and for one that llama.cpp's file cannot hold."""
        for name in self.shapes:
            check_shape(name)
            if LLAMA in self.peers and SHAPES[name]().model_type != "llama":
                raise BenchError(f"{name} is no Llama, and only Llamas are converted to GGUF; leave out llama.cpp with --peer.")


def parse_bits(text: str) -> list[int]:
    """Comma-separated numbers of bits. Raises BenchError."""
    bits = [int(item) if item.isdecimal() else 0 for item in text.split(",")]
    if not all(number in KINDS for number in bits):
        raise BenchError(f"--bits takes some of {', '.join(map(str, KINDS))}, separated by commas, not {text!r}.")
    return bits


def settings_by_bits(config: Path | None, flags: Sequence[str], bits: Sequence[int]) -> dict[int, Settings]:
    """The settings of the command line in each number of bits, on the CPU, by default with all cores.

    Raises SettingsError, and BenchError if a flag sets what the number of bits chooses.
    """
    given = parse_flags(flags)
    if name := next((name for name in ("model.dtype", "model.quantize") if name in given), None):
        raise BenchError(f"--bits chooses {name}; leave out --{name}.")
    threads = load_settings(config, given).model.threads or os.cpu_count() or 1
    common = given | {"model.device": "cpu", "model.threads": threads}
    kinds = {number: {"model.dtype": KINDS[number].dtype, "model.quantize": KINDS[number].quantize} for number in bits}
    return {number: load_settings(config, common | kind) for number, kind in kinds.items()}


def run(settings: dict[int, Settings], choice: Choice, out: Path | None) -> dict[str, Any]:
    """Measures, prints, and saves the figures if `out` is given. Raises BenchError.

    Peers that are not installed are left out, and named with the command that installs them.
    """
    missing = {name: command for name in choice.peers if (command := install_command(PEERS[name].packages))}
    choice = replace(choice, peers=[name for name in choice.peers if name not in missing])
    if not choice.peers:
        raise BenchError(f"None of the peers is installed: {'; '.join(missing.values())}.")
    lines, resources = load_lines(settings[choice.bits[0]], choice)
    found: dict[str, Any] = {
        "threads": settings[choice.bits[0]].model.threads,
        "max_tokens": choice.max_tokens,
        "versions": {name: installed_version(name) for name in VERSIONS},
        "not_installed": missing,
        "steps": [],
        "replay": [],
    }
    items = ROUNDS + count_items(len(lines), choice.repeats)
    with tempfile.TemporaryDirectory(prefix="outrider-peers-") as folder, Progress() as progress:
        task = progress.add_task("random shapes", total=items * len(choice.shapes) * len(choice.bits))
        for shape in choice.shapes:
            files = write_files(shape, choice.bits, Path(folder)) if LLAMA in choice.peers else {}
            for bits, each in settings.items():
                weights = RandomWeights(shape, each, files.get(bits), resources, choice.drafters)
                for name, rows in measure(weights, choice, lines, partial(progress.advance, task)).items():
                    found[name] += [{"shape": shape, "bits": bits, **row} for row in rows]
    tables.show(found)
    if out:
        report.save(out, found)
    return found


def load_lines(settings: Settings, choice: Choice) -> tuple[list[Line], Resources]:
    """The recorded answers, cut to `max_tokens`, and what Outrider's drafters know. Raises BenchError."""
    if choice.recordings is None:
        return [], Resources(vocabulary=1)
    context = min(context_of(shape, settings) for shape in choice.shapes)
    lines, resources = load_replay(choice.recordings, settings.speculation.options, context)
    return [replace(line, answer=line.answer[: choice.max_tokens]) for line in lines], resources


def measure(
    weights: RandomWeights, choice: Choice, lines: Sequence[Line], advance: Callable[[], None]
) -> dict[str, list[dict[str, Any]]]:
    """The rows of one shape in one number of bits."""
    with ExitStack() as stack:
        peers = [PEERS[name](weights, stack) for name in choice.peers]
        return {
            "steps": time_steps(peers, advance),
            "replay": replay(peers, lines, choice.repeats, advance) if lines else [],
        }


def replay(
    peers: Sequence[ShapePeer], lines: Sequence[Line], repeats: int, advance: Callable[[], None] = lambda: None
) -> list[dict[str, Any]]:
    """The figures of forced replay of all lines."""
    answers = take_turns(contenders(peers), lines, repeats, advance)
    return figures(record(answers, [len(line.prompt) for line in lines] * repeats))


def write_files(shape: str, bits: Sequence[int], folder: Path) -> dict[int, Path]:
    """The weights as GGUF files, by number of bits."""
    model = random_runner(shape, torch.bfloat16, "cpu", pack=False, trace=False).model
    files = {number: folder / f"{shape}-{number}.gguf" for number in bits}
    for number, file in files.items():
        write(file, model.config, model.state_dict(), KINDS[number].gguf)
    return files


def time_steps(peers: Sequence[ShapePeer], advance: Callable[[], None]) -> list[dict[str, Any]]:
    """Median milliseconds of a step of each peer by its rows, measured in turns of STEPS_IN_TURN steps.

    The first step of a turn does not count: threads of the other program may still spin, and caches hold its weights.
    """
    rounds: list[list[list[float]]] = []

    def in_turn(peer: ShapePeer, rows: int) -> float:
        return median([peer.step_seconds(rows) for _ in range(STEPS_IN_TURN)][1:])

    for _ in range(ROUNDS):
        rounds.append([[in_turn(peer, rows) for rows in tables.ROWS] for peer in peers])
        advance()
    medians = np.median(np.array(rounds[1:]), axis=0)  # [peers, rows]; the first round warms up
    return [
        {"peer": peer.name}
        | {f"rows_{rows}_ms": round(1e3 * float(seconds), 2) for rows, seconds in zip(tables.ROWS, row, strict=True)}
        for peer, row in zip(peers, medians, strict=True)
    ]
