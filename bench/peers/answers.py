"""Peers that answer the same prompts, in turns: all of one number of bits at a time, in process and over HTTP."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import Progress
from transformers import AutoConfig

from bench.peers.hugging_face import TransformersInProcess, TransformersServer
from bench.peers.levels import Levels
from bench.peers.llama import LlamaInProcess, LlamaServer
from bench.peers.outrider import OutriderInProcess, OutriderServer
from bench.peers.peer import Peer, Question, Weights
from bench.peers.turns import Contender, count_items, figures, take_turns
from bench.plan import Plan
from outrider.drafters.interface import Ints
from outrider.verify.tokenizer import load_tokenizer

PEERS: Mapping[str, type[Peer]] = {
    "outrider": OutriderInProcess,
    "llama.cpp": LlamaInProcess,
    "transformers": TransformersInProcess,
    "outrider-http": OutriderServer,
    "llama.cpp-http": LlamaServer,
    "transformers-http": TransformersServer,
}


@dataclass(frozen=True)
class Choice:
    """What is measured."""

    plan: Plan
    bits: Sequence[int]
    peers: Sequence[str]  # names in PEERS
    draft: str | None = None  # folder of the assistant model of transformers' generate


def measure(choice: Choice, levels: Levels, folder: Path, progress: Progress) -> list[dict[str, Any]]:
    """A row per number of bits, temperature and contender. Converted files go to `folder`. Raises BenchError."""
    plan = choice.plan
    tokenizer = load_tokenizer(levels.settings(choice.bits[0]).model.path)
    encoded = [np.array(tokenizer.encode(prompt), np.int32) for prompt in plan.prompts]
    items = count_items(len(encoded), plan.repeats)
    task = progress.add_task("answering", total=items * len(choice.bits) * len(plan.temperatures))
    advance = partial(progress.advance, task)
    return [row for bits in choice.bits for row in measure_level(choice, levels, bits, encoded, folder, advance)]


def measure_level(
    choice: Choice, levels: Levels, bits: int, encoded: Sequence[Ints], folder: Path, advance: Callable[[], None]
) -> list[dict[str, Any]]:
    """The rows of one number of bits; `encoded` are the prompts' token ids."""
    plan, rows = choice.plan, list[dict[str, Any]]()
    with ExitStack() as stack:
        weights = make_weights(choice, levels, bits, folder)
        peers = [PEERS[name](weights, stack) for name in choice.peers if bits in PEERS[name].bits]
        contenders = {
            Contender(peer.name, method, peer.transport): partial(peer.answer, method)
            for peer in peers
            for method in peer.methods
        }
        for temperature in plan.temperatures:
            questions = [
                Question(prompt, ids, temperature, plan.max_tokens, plan.seed)
                for prompt, ids in zip(plan.prompts, encoded, strict=True)
            ]
            tallies = take_turns(contenders, questions, plan.repeats, advance)
            rows += [{"bits": bits, "temperature": temperature, **row} for row in figures(tallies)]
    return rows


def make_weights(choice: Choice, levels: Levels, bits: int, folder: Path) -> Weights:
    """The model in a number of bits."""
    settings = levels.settings(bits)
    return Weights(
        bits=bits,
        settings=settings,
        flags=levels.server_flags(bits),
        threads=levels.threads,
        context_tokens=settings.model.context_tokens or AutoConfig.from_pretrained(settings.model.path).max_position_embeddings,
        folder=folder,
        drafters=choice.plan.drafters,
        draft=choice.draft,
    )
