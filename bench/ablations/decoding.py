"""The answers of one drafter to a list of prompts, and the figures that the papers report of them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from outrider.drafters.interface import DraftTree, Ints, Source
from outrider.drafters.model.pearl import PearlDrafter
from outrider.drafters.options import DrafterName
from outrider.drafters.registry import Resources, make
from outrider.server.worker.runtime import Runtime
from outrider.verify.decode import decode
from outrider.verify.sampling_params import SamplingParams
from outrider.verify.stream import DecodeOptions, Step
from outrider.verify.verifier import Verifier

NODES = 64  # of a draft, as in REST's own run
MAX_RANK = 5  # children of a node that are told apart


@dataclass
class Decoding:
    """All answers of one drafter."""

    answers: int = 0
    tokens: int = 0
    drafted: int = 0  # tokens that the draft model proposed
    steps: list[Step] = field(default_factory=list)
    seconds: float = 0.0
    right: int = 0  # tokens of PEARL's drafts that agreed with the answer
    rejections: int = 0

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / len(self.steps)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def accepted(self) -> int:
        """Accepted draft tokens."""
        return sum(len(step.path) for step in self.steps)

    @property
    def acceptance(self) -> float:
        """The drafted share of the emitted tokens, as in GSD's tables."""
        return self.accepted / self.tokens

    @property
    def graph_success(self) -> float:
        """The share of the steps that accepted merged nodes."""
        return sum(bool(merged(step)) for step in self.steps) / len(self.steps)

    def ranks(self) -> Counter[int]:
        """The number of accepted nodes by their rank among their siblings, the likeliest of which has rank 0."""
        found: Counter[int] = Counter()
        for step in self.steps:
            tree = tree_of(step)
            for row in step.path.tolist():
                siblings = np.flatnonzero(tree.parents == tree.parents[row])
                found[min(MAX_RANK - 1, int(np.searchsorted(siblings, row)))] += 1
        return found

    def milliseconds(self, phase: str) -> float:
        """Of a step's phase, on average: draft, verify or commit."""
        seconds: float = sum(getattr(step, f"{phase}_seconds") for step in self.steps)
        return 1e3 * seconds / len(self.steps)


def tree_of(step: Step) -> DraftTree:
    """The verified draft of a step of `Decoding.steps`."""
    assert step.tree is not None
    return step.tree


def merged(step: Step) -> int:
    """The number of accepted merged nodes."""
    return int((tree_of(step).source[step.path] == Source.MERGED).sum())


def decode_all(
    runtime: Runtime,
    resources: Resources,
    name: DrafterName,
    prompts: Sequence[Ints],
    params: SamplingParams,
    max_tokens: int,
    nodes: int = NODES,
) -> Decoding:
    """Answers every prompt with a new session; the number of a prompt is its seed."""
    result, started = Decoding(), time.perf_counter()
    for seed, prompt in enumerate(prompts):
        drafter = make(name, resources)
        verifier = Verifier(runtime.runner, runtime.runner.new_cache())
        options = DecodeOptions(replace(params, seed=seed), max_tokens, runtime.stop_ids, nodes)
        answer = decode(verifier, drafter, prompt, options)
        result.answers += 1
        result.tokens += len(answer.tokens)
        result.steps += answer.steps
        result.drafted += getattr(drafter, "drafted_tokens", 0)
        if isinstance(drafter, PearlDrafter):
            result.right += drafter.accepted_tokens
            result.rejections += drafter.rejections
    result.seconds = time.perf_counter() - started
    return result
