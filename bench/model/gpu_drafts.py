"""Drafting with a model: random weights of two shapes, and a synthetic answer of which the draft model knows a given share.

The costs are real. Tables are left out, because they learn nothing from a random answer.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from bench.ablations.simulation import agreement, with_errors
from bench.model.forced import forced_verifier
from bench.model.shapes import random_runner
from outrider.drafters.interface import MAX_NODES, Ints
from outrider.drafters.model.language_model import Candidates
from outrider.drafters.options import DrafterName, Options
from outrider.drafters.registry import Resources, make
from outrider.verify.decode import decode
from outrider.verify.draft_model.runner import DraftRunner
from outrider.verify.draft_model.session import SessionDraft
from outrider.verify.model.torch_runner import TorchRunner
from outrider.verify.sampling_params import SamplingParams
from outrider.verify.stream import DecodeOptions

METHODS: tuple[DrafterName, ...] = ("none", "draft", "draft-tree", "draft-graph", "pearl")
RATE = 0.8  # of the draft model's tokens that are right
PROMPT_TOKENS, ANSWER_TOKENS, CONTEXT_TOKENS = 32, 192, 1024
REPEATS = 3


class SyntheticDraft(SessionDraft):
    """A draft model that runs its forwards but proposes given tokens."""

    guesses = np.empty(0, np.int32)  # int32 [answer]

    def _candidates(self, logits: torch.Tensor, depths: Collection[int], count: int) -> Candidates:
        candidates = super()._candidates(logits, depths, count)
        first = self._length - self._text.prompt_length
        positions = np.minimum(np.array(list(depths)) + first, len(self.guesses) - 1)
        tokens = candidates.tokens.copy()
        shares = np.full_like(candidates.probability, (1 - RATE) / max(1, count - 1))
        tokens[:, 0], shares[:, 0] = self.guesses[positions], RATE
        return Candidates(tokens, shares)


def drafting(shape: str, draft_shape: str) -> dict[str, Any]:
    """The methods' speeds with these shapes, in bfloat16 on a GPU."""
    target, draft = (random_runner(each, torch.bfloat16, "cuda", CONTEXT_TOKENS) for each in (shape, draft_shape))
    shared = DraftRunner(draft, target.vocabulary)
    shared.measure(target)
    figures = speeds(target, shared, ANSWER_TOKENS)
    torch.cuda.empty_cache()
    return figures


def speeds(target: TorchRunner, draft: DraftRunner, tokens: int) -> dict[str, Any]:
    """Tokens per second and per step of the methods, which take turns, and their speeds relative to plain decoding."""
    answer = 2 * np.random.default_rng(0).integers(0, target.vocabulary // 2 - 1, tokens + MAX_NODES).astype(np.int32)
    drafted = type("Drafted", (SyntheticDraft,), {"guesses": with_errors(answer, agreement(RATE, len(answer), 0))})
    resources = Resources(always_drafting(Options()), model=lambda: drafted(draft))
    found: dict[DrafterName, list[tuple[float, float]]] = {name: [] for name in METHODS}
    for _ in range(REPEATS + 1):
        for name, runs in found.items():
            runs.append(run(target, answer, resources, name, tokens))
    rows = {name: [statistics.median(values) for values in zip(*runs[1:], strict=True)] for name, runs in found.items()}
    results = [
        {"drafter": name, "tokens_per_second": round(speed, 2), "tokens_per_step": round(per_step, 3)}
        | {"speedup": round(speed / rows["none"][0], 3)}
        for name, (speed, per_step) in rows.items()
    ]
    return {"acceptance_rate": RATE, "speed_ratio": round(draft.speed_ratio, 2), "results": results}


def always_drafting(options: Options) -> Options:
    """The methods as in their papers, which always draft."""
    methods = {
        name: replace(getattr(options, name), only_if_worth=False) for name in ("draft", "draft_tree", "draft_graph", "pearl")
    }
    return replace(options, **methods)


def run(target: TorchRunner, answer: Ints, resources: Resources, name: DrafterName, tokens: int) -> tuple[float, float]:
    """Tokens per second and per step of one answer."""
    prompt = np.arange(PROMPT_TOKENS, dtype=np.int32)
    options = DecodeOptions(SamplingParams(temperature=0), tokens, max_nodes=MAX_NODES)
    started = time.perf_counter()
    decoded = decode(forced_verifier(target, answer), make(name, resources), prompt, options)
    return tokens / (time.perf_counter() - started), tokens / len(decoded.steps)
