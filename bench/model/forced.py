"""Forced replay: real forwards of a real shape, the target's choices replaced by a recorded answer.

So the costs are the machine's and the acceptance is that of the model that wrote the answer. The logits of random weights
mean nothing, so there is no feedback from them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch

from bench.replay import Line
from drafters.interface import Drafter, DraftTree, Ints
from drafters.none import NoDrafter
from drafters.options import DrafterName
from drafters.registry import Resources, make
from verify.acceptance import walk
from verify.cost import CostCurve
from verify.decode import Decoded, DecodeOptions, decode
from verify.model.runner import ModelRunner
from verify.model.transfer import to_host
from verify.sampling_params import SamplingParams
from verify.verifier import TreeVerifier


class Recorded:
    """The choices of a recorded answer. Implements `verify.acceptance.Rule`."""

    def __init__(self, answer: Ints) -> None:
        self._answer = answer.tolist()

    def decide(
        self, logits: torch.Tensor, tree: DraftTree, first: int, extra: Sequence[torch.Tensor] = ()
    ) -> tuple[Ints, Ints, list[Any]]:
        _, *others = to_host(logits.argmax(-1).int(), *extra)  # what a greedy choice would have cost
        depths = [0, *tree.depths.tolist()]
        on_record = [True]
        for parent, depth, token in zip(tree.parents.tolist(), depths[1:], tree.tokens.tolist(), strict=True):
            on_record.append(on_record[parent + 1] and self._next(first + depth - 1) == token)
        chosen = [self._next(first + depth) if right else -1 for right, depth in zip(on_record, depths, strict=True)]
        return *walk(tree, chosen), others

    def _next(self, position: int) -> int:
        return self._answer[position] if position < len(self._answer) else 0


class ForcedVerifier(TreeVerifier):
    """A TreeVerifier that emits a recorded answer."""

    def __init__(self, runner: ModelRunner, answer: Ints) -> None:
        super().__init__(runner, runner.new_cache())
        self._answer = answer

    def begin(
        self, prompt: Ints, params: SamplingParams, max_tokens: int, stop_ids: Collection[int] = (), scores: bool = False
    ) -> int:
        reused = super().begin(prompt, params, max_tokens, stop_ids, scores)
        self._rule = Recorded(self._answer)
        return reused


def forced_answer(
    runner: ModelRunner, name: DrafterName, resources: Resources, line: Line, max_nodes: int, curve: CostCurve | None
) -> Decoded:
    """Decodes a recorded line: its prompt is read, its answer emitted."""
    drafter: Drafter = NoDrafter() if name == "none" else make(name, resources)
    drafter.feedback = 0
    options = DecodeOptions(SamplingParams(temperature=0), len(line.answer), max_nodes=max_nodes, curve=curve)
    prompt = line.prompt[-(runner.context_tokens - len(line.answer) - 1) :]
    decoded = decode(ForcedVerifier(runner, line.answer), drafter, prompt, options)
    assert np.array_equal(decoded.tokens, line.answer)
    return decoded
