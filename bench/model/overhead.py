"""What a step costs beside the model's forward: processing logits, choosing tokens, and committing them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from bench import report
from outrider.drafters.interface import EMPTY, DraftTree, Ints, Source, Verdict, chain
from outrider.verify.measurement import FEEDBACK
from outrider.verify.model.batch import ForwardBatch
from outrider.verify.model.torch_runner import TorchRunner
from outrider.verify.sampling_params import SamplingParams
from outrider.verify.verifier import Verifier

NODES = (0, 8, 16)
ACCEPTED = 2  # nodes of each draft, so that a step chooses three tokens
PROMPT_TOKENS = 520  # drafts of 16 nodes fit into a block of invariant rows
ROUNDS = 41
SETTINGS = {
    "greedy, with feedback": (SamplingParams(temperature=0), FEEDBACK),
    "temperature 0.8": (SamplingParams(temperature=0.8), 0),
    "and top_p 0.95": (SamplingParams(temperature=0.8, top_p=0.95), 0),
    "and top_k 20, penalty 1.05": (
        SamplingParams(temperature=0.8, top_p=0.95, top_k=20, repetition_penalty=1.05),
        0,
    ),
}


def step_over_forward(runner: TorchRunner) -> dict[str, dict[str, dict[str, float]]]:
    """Ratios and milliseconds by setting and number of draft nodes; a step is compared with the forward next to it."""
    prompt = np.random.default_rng(0).integers(0, runner.vocabulary, PROMPT_TOKENS).astype(np.int32)
    verifier = Verifier(runner, runner.new_cache())
    return {
        name: {str(nodes): paired(runner, verifier, prompt, params, feedback, nodes) for nodes in NODES}
        for name, (params, feedback) in SETTINGS.items()
    }


def paired(
    runner: TorchRunner, verifier: Verifier, prompt: Ints, params: SamplingParams, feedback: int, nodes: int
) -> dict[str, float]:
    """The figures of one setting, from rounds of a forward and a step over the same draft."""

    def begin() -> None:
        verifier.begin(prompt, params, max_tokens=nodes + ACCEPTED + 1)
        verifier.prefill()

    begin()
    answer = [_plain_step(verifier) for _ in range(ACCEPTED)]
    tree = _draft(answer, nodes, runner.vocabulary)
    forwards, phases = [], []
    for _ in range(ROUNDS):
        begin()
        forwards.append(_seconds(lambda: _forward(runner, verifier, tree)))
        started = time.perf_counter()
        verdict = verifier.verify(tree, feedback)
        verified = time.perf_counter()
        verifier.commit(verdict)
        phases.append((verified - started, time.perf_counter() - verified))
    ratios = [sum(phase) / forward for phase, forward in zip(phases, forwards, strict=True)]
    return {
        "step_over_forward": round(statistics.median(ratios), 3),
        "forward_ms": round(1e3 * statistics.median(forwards), 3),
        "choose_ms": round(1e3 * statistics.median(p[0] - f for p, f in zip(phases, forwards, strict=True)), 3),
        "commit_ms": round(1e3 * statistics.median(commit for _, commit in phases), 3),
    }


def _plain_step(verifier: Verifier) -> int:
    """A step without a draft; returns its token."""
    verdict: Verdict = verifier.verify(EMPTY)
    verifier.commit(verdict)
    return int(verdict.tokens[0])


def _draft(answer: list[int], nodes: int, vocabulary: int) -> DraftTree:
    """A chain of `nodes` that begins with the answer's tokens and goes on with others."""
    wrong = [(answer[-1] + 1 + index) % vocabulary for index in range(nodes)]
    tokens = [*answer, *wrong][:nodes]
    return chain(np.array(tokens, np.int32), np.ones(nodes, np.float32), Source.NONE)


def _forward(runner: TorchRunner, verifier: Verifier, tree: DraftTree) -> None:
    """The forward of a step, and no more."""
    batch = ForwardBatch.tree(int(verifier.sequence.tokens[-1]), tree)
    runner.forward(verifier.cache, batch)
    if runner.device.type == "cuda":
        torch.cuda.synchronize()


def _seconds(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def show(figures: dict[str, dict[str, dict[str, float]]]) -> None:
    """Prints a table of all settings."""
    rows: list[tuple[Any, ...]] = [
        (name, nodes, *(f"{value:.3f}" for value in row.values())) for name, by in figures.items() for nodes, row in by.items()
    ]
    report.print_table(
        "Whole steps against forwards alone",
        ("sampling", "nodes", "step over\nforward", "forward\n(ms)", "choose\n(ms)", "commit\n(ms)"),
        rows,
    )
