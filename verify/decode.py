"""The decode loop: one request from its prompt to its last token, a step at a time.

Promises the tokens of plain decoding, whatever the drafter: a step's tokens are cut at a stop token and at the limit, also
inside an accepted block. Knows token ids only, nothing of text.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from drafters.interface import Drafter, DraftTree, Ints, Logprobs, Verdict
from verify.budget import FixedBudget, MeasuredBudget
from verify.cost import CostCurve
from verify.grammar import Grammar
from verify.sampling_params import SamplingParams
from verify.verifier import Verifier

Finish = Literal["stop", "length"]


class PromptError(ValueError):
    """The prompt cannot be decoded; the message says why."""


@dataclass(frozen=True)
class DecodeOptions:
    """How one answer is decoded."""

    params: SamplingParams
    max_tokens: int
    stop_ids: frozenset[int] = frozenset()
    max_nodes: int = 24  # draft nodes a step; 0 = plain decoding
    curve: CostCurve | None = None  # with it, as many nodes as pay, whatever `max_nodes` says
    prediction: tuple[int, ...] = ()  # token ids that the client expects to read
    scores_prompt: bool = False  # the prompt's own tokens get log-probabilities, too


@dataclass(frozen=True)
class Step:
    """What one step brought: no tokens while the prompt is read or where none are wanted, else at least one."""

    tokens: list[int]
    finish: Finish | None = None
    tree: DraftTree | None = None  # None while the prompt is read
    logprobs: Logprobs | None = None  # where the request asks
    accepted: Ints = field(default_factory=lambda: np.empty(0, np.int32))  # int32 [A]; rows of `tree`
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    commit_seconds: float = 0.0


class Generation:
    """One answer in the making. `step()` until a step has `finish`; `close()` in any case."""

    def __init__(
        self, verifier: Verifier, drafter: Drafter, prompt: Ints, options: DecodeOptions, grammar: Grammar | None = None
    ) -> None:
        """`prompt` is int32 [P], P >= 1; a `grammar` stands at its beginning. Raises PromptError where it does not fit."""
        if not len(prompt):
            raise PromptError("The prompt is empty; give at least one token.")
        self._verifier = verifier
        self._drafter = drafter
        self._options = options
        self._grammar = grammar
        if len(prompt) >= verifier.context_tokens:
            raise PromptError("The prompt fills the whole context; shorten it.")
        self._stop_ids = frozenset[int]() if options.params.ignore_eos else options.stop_ids
        self.reused_tokens = verifier.begin(prompt, options.params, self._stop_ids, options.scores_prompt)
        self._prefill: Iterator[int] | None = verifier.prefill(prompt)
        drafter.begin(prompt, np.array(options.prediction, np.int32), options.params)
        self._budget = MeasuredBudget(options.curve) if options.curve else FixedBudget(options.max_nodes)
        self._left = min(options.max_tokens, verifier.space)
        self._emitted = 0
        self._start = len(prompt)

    def step(self) -> Step:
        """Reads one chunk of the prompt, or drafts, verifies and commits once."""
        if self._prefill is not None:
            if next(self._prefill, None) is not None:
                return Step([])
            self._prefill = None
        if not self._left:
            return Step([], "length")
        started = time.perf_counter()
        # The bonus token follows the deepest accepted node, so a useful draft is one token shorter than what is left.
        nodes = self._budget.ask() if self._left > 1 else 0
        draft = self._drafter.propose(nodes).limit(self._left - 1)
        drafted = time.perf_counter()
        # Which draws stand in a draft must not depend on what was drawn, or they would be no draws.
        tree = draft if draft.q is not None else self._budget.prune(draft, self._start + self._emitted)
        allowed = None
        if self._grammar is not None:
            tree, allowed = self._grammar.visit(tree, self._left - 1)
        verdict, finish = self._cut(self._verifier.verify(tree, self._drafter.feedback, allowed))
        if self._grammar is not None:
            self._grammar.commit(verdict.tokens)
        verified = time.perf_counter()
        self._drafter.observe(verdict)
        self._budget.record(draft, tree, verdict.tokens, drafted - started)
        tokens = verdict.tokens.tolist()
        self._emitted += len(tokens)
        self._left -= len(tokens)
        seconds = (drafted - started, verified - drafted, time.perf_counter() - verified)
        return Step(tokens, finish, tree, verdict.logprobs, verdict.rows, *seconds)

    def _cut(self, verdict: Verdict) -> tuple[Verdict, Finish | None]:
        """Ends the verdict's tokens at the first stop token, or at the limit."""
        finish: Finish | None = None
        count = len(verdict.tokens)
        if count >= self._left:
            count, finish = self._left, "length"
        for i, token in enumerate(verdict.tokens[:count].tolist()):
            if token in self._stop_ids:
                count, finish = i + 1, "stop"
                break
        if count < len(verdict.tokens):
            self._verifier.truncate(self._start + self._emitted + count)
        return verdict.cut(count), finish

    @property
    def prompt_logprobs(self) -> Logprobs | None:
        """Of the prompt's tokens but the first, once the prompt is read; None where nobody asked."""
        return self._verifier.prompt_logprobs

    def take_back(self, count: int) -> None:
        """Forgets the last `count` emitted tokens: the text ended before them."""
        self._emitted -= count
        self._verifier.truncate(self._start + self._emitted)

    def close(self) -> None:
        """Ends the request for the drafter; the verifier keeps the committed text for the session's next request."""
        self._drafter.end()


@dataclass(frozen=True)
class Decoded:
    """A whole answer and what it took."""

    tokens: list[int]
    finish: Finish
    steps: list[Step]

    @property
    def tokens_per_step(self) -> float:
        """Tokens emitted per target forward, the bonus tokens included."""
        return len(self.tokens) / max(1, len(self.steps))


def decode(
    verifier: Verifier, drafter: Drafter, prompt: Ints, options: DecodeOptions, grammar: Grammar | None = None
) -> Decoded:
    """One answer, from its prompt to its end."""
    return finish(Generation(verifier, drafter, prompt, options, grammar))


def finish(generation: Generation) -> Decoded:
    """Runs a generation to its end."""
    tokens: list[int] = []
    steps: list[Step] = []
    try:
        while True:
            step = generation.step()
            tokens.extend(step.tokens)
            if step.tree is not None:
                steps.append(step)
            if step.finish is not None:
                return Decoded(tokens, step.finish, steps)
    finally:
        generation.close()
