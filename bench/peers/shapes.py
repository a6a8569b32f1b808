"""Random weights of a known shape: the time of a step by its rows, and forced replay of recorded answers.

Every program emits the recorded tokens, so what it drafts is accepted as often as with the model that wrote them.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import torch
from rich.progress import Progress

from bench.model.forced import forced_answer, select_fitting
from bench.model.gguf_file import write
from bench.model.shapes import SHAPES, check_shape, random_runner
from bench.model.steps import make_runner
from bench.peers import llama
from bench.peers.levels import Levels
from bench.peers.outrider import NAME as OUTRIDER
from bench.peers.peer import KINDS, Answer
from bench.peers.turns import Contender, count_items, figures, take_turns
from bench.plan import BenchError
from bench.recordings import Line, Recordings, load_encoder, load_resources, load_stream
from outrider.drafters.interface import MAX_NODES
from outrider.drafters.options import DrafterName
from outrider.drafters.registry import Resources, warm
from outrider.server.settings import Settings
from outrider.verify.measurement import CONTEXTS, measure, timed_forward

ROWS = (1, 8, 16)
ROUNDS = 15
CONTEXT = CONTEXTS[0]  # tokens before a step


@dataclass(frozen=True)
class RandomWeights:
    """Random weights of a shape in one number of bits."""

    shape: str
    settings: Settings
    threads: int
    context_tokens: int
    gguf: Path | None  # None if llama.cpp does not take part
    resources: Resources  # of Outrider's drafters
    drafters: Sequence[str]


class ShapePeer(ABC):
    """A program that holds random weights."""

    name: ClassVar[str]
    methods: Sequence[str]

    @abstractmethod
    def __init__(self, weights: RandomWeights, stack: ExitStack) -> None:
        """Loads the weights; closing the stack frees them."""

    @abstractmethod
    def step_seconds(self, rows: int) -> float:
        """Seconds of a forward over some tokens after CONTEXT others, with the likeliest token at each."""

    @abstractmethod
    def replay(self, method: str, line: Line) -> Answer:
        """Reads the prompt of a line and emits its answer."""


class OutriderShape(ShapePeer):
    """Outrider's runner, with each of the chosen drafters."""

    name = OUTRIDER

    def __init__(self, weights: RandomWeights, stack: ExitStack) -> None:
        self.methods = weights.drafters
        self._resources = weights.resources
        self._runner = make_runner(weights.shape, weights.settings)
        nodes = weights.settings.speculation.max_nodes
        self._budget = (MAX_NODES, measure(self._runner)) if nodes == "auto" else (nodes, None)
        self._cache = self._runner.new_cache()
        self._cache.fill(CONTEXT)

    def step_seconds(self, rows: int) -> float:
        return timed_forward(self._runner, self._cache, rows - 1)

    def replay(self, method: str, line: Line) -> Answer:
        started = time.perf_counter()
        decoded = forced_answer(self._runner, cast(DrafterName, method), self._resources, line, *self._budget)
        return Answer(len(decoded.tokens), time.perf_counter() - started, decoded.tokens, len(decoded.steps))


class LlamaShape(ShapePeer):
    """llama.cpp's own loops, plain and with its n-gram drafts, over tokens that the record chooses."""

    name, methods = llama.NAME, (llama.PLAIN, llama.LOOKUP)

    def __init__(self, weights: RandomWeights, stack: ExitStack) -> None:
        assert weights.gguf is not None
        self._models = llama.open_models(weights.gguf, weights.context_tokens, weights.threads, stack)

    def step_seconds(self, rows: int) -> float:
        model = self._models[llama.LOOKUP]  # computes logits at every row
        if model.n_tokens != CONTEXT:
            model.begin()
            model.eval([0] * CONTEXT)
        started = time.perf_counter()
        model.eval([0] * rows)
        model.scores[CONTEXT : CONTEXT + rows].argmax(-1)
        seconds = time.perf_counter() - started
        model.n_tokens = CONTEXT
        return seconds

    def replay(self, method: str, line: Line) -> Answer:
        model = self._models[method]
        model.begin(line.answer.tolist(), start=len(line.prompt))
        started = time.perf_counter()
        generated = model.generate(line.prompt.tolist(), temp=0.0, **llama.SAMPLING)
        tokens = list(islice(generated, len(line.answer)))
        seconds = time.perf_counter() - started
        assert tokens == line.answer.tolist()
        return Answer(len(tokens), seconds, tokens, model.evaluations)


PEERS: Mapping[str, type[ShapePeer]] = {OUTRIDER: OutriderShape, llama.NAME: LlamaShape}


@dataclass(frozen=True)
class Shapes:
    """What is measured."""

    names: Sequence[str]  # in SHAPES
    bits: Sequence[int]
    peers: Sequence[str]  # names in PEERS
    drafters: Sequence[str]
    recordings: Recordings | None  # None measures steps only
    max_tokens: int  # per answer
    repeats: int

    def __post_init__(self) -> None:
        """Raises BenchError for an unknown shape, and for one that llama.cpp's file cannot hold."""
        for name in self.names:
            check_shape(name)
            if llama.NAME in self.peers and SHAPES[name]().model_type != "llama":
                raise BenchError(f"{name} is no Llama, and only Llamas are converted to GGUF; leave out llama.cpp with --peer.")


@dataclass(frozen=True)
class Material:
    """Recorded answers."""

    lines: Sequence[Line]  # empty measures steps only
    resources: Resources  # what Outrider's drafters know


def measure_shapes(
    chosen: Shapes, material: Material, levels: Levels, folder: Path, progress: Progress
) -> dict[str, list[dict[str, Any]]]:
    """Rows of `steps` and of `replay` of every shape. Converted files go to `folder`. Raises BenchError."""
    found: dict[str, list[dict[str, Any]]] = {"steps": [], "replay": []}
    if not chosen.names:
        return found
    lines, resources = material.lines, material.resources
    items = ROUNDS + (count_items(len(lines), chosen.repeats) if lines else 0)
    task = progress.add_task("random shapes", total=items * len(chosen.names) * len(chosen.bits))
    for shape in chosen.names:
        files = write_files(shape, chosen.bits, folder) if llama.NAME in chosen.peers else {}
        for bits in chosen.bits:
            settings = levels.settings(bits)
            context = settings.model.context_tokens or SHAPES[shape]().max_position_embeddings
            weights = RandomWeights(shape, settings, levels.threads, context, files.get(bits), resources, chosen.drafters)
            for name, rows in measure_level(weights, chosen, lines, partial(progress.advance, task)).items():
                found[name] += [{"shape": shape, "bits": bits, **row} for row in rows]
    return found


def measure_level(
    weights: RandomWeights, chosen: Shapes, lines: Sequence[Line], advance: Callable[[], None]
) -> dict[str, list[dict[str, Any]]]:
    """The rows of one shape in one number of bits."""
    with ExitStack() as stack:
        peers = [PEERS[name](weights, stack) for name in chosen.peers]
        found = {"steps": time_steps(peers, advance)}
        if lines:
            contenders = {
                Contender(peer.name, method): partial(peer.replay, method) for peer in peers for method in peer.methods
            }
            fitting = [fit(line, weights.context_tokens) for line in lines]
            found["replay"] = figures(take_turns(contenders, fitting, chosen.repeats, advance))
    return found


def load_material(chosen: Shapes, levels: Levels) -> Material:
    """The recorded answers, cut to `max_tokens`. Raises BenchError."""
    if chosen.recordings is None:
        return Material([], Resources(vocabulary=1))
    settings = levels.settings(chosen.bits[0])
    encoder = load_encoder(chosen.recordings.tokenizer)
    lines, _ = load_stream(chosen.recordings.streams[0], encoder, chosen.recordings.limit)
    resources = load_resources(chosen.recordings.corpus, encoder, settings.speculation.options)
    warm(resources)
    context = min(
        [settings.model.context_tokens or 1 << 30, *(SHAPES[name]().max_position_embeddings for name in chosen.names)]
    )
    cut = [replace(line, answer=line.answer[: chosen.max_tokens]) for line in select_fitting(lines, context)]
    return Material(cut, resources)


def fit(line: Line, context: int) -> Line:
    """The line with the end of its prompt that fits the context."""
    return replace(line, prompt=line.prompt[-(context - len(line.answer) - 1) :])


def write_files(shape: str, bits: Sequence[int], folder: Path) -> dict[int, Path]:
    """The weights as GGUF files, by number of bits."""
    model = random_runner(shape, torch.bfloat16, "cpu", pack=False, trace=False).model
    files = {number: folder / f"{shape}-{number}.gguf" for number in bits}
    for number, file in files.items():
        write(file, model.config, model.state_dict(), KINDS[number].gguf)
    return files


def time_steps(peers: Sequence[ShapePeer], advance: Callable[[], None]) -> list[dict[str, Any]]:
    """Median milliseconds of a step of each peer by its rows, measured in turns."""
    rounds: list[list[list[float]]] = []
    for _ in range(ROUNDS):
        rounds.append([[peer.step_seconds(rows) for rows in ROWS] for peer in peers])
        advance()
    medians = np.median(np.array(rounds[1:]), axis=0)  # [peers, rows]; the first round warms up
    return [
        {"peer": peer.name}
        | {f"rows_{rows}_ms": round(1e3 * float(seconds), 2) for rows, seconds in zip(ROWS, row, strict=True)}
        for peer, row in zip(peers, medians, strict=True)
    ]
