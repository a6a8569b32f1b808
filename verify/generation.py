"""One request from its prompt to its last token, step by step.

A step has phases, so that `outrider.verify.round` computes the forward of several requests' steps at once. Works on token ids;
knows nothing about text.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.drafters.interface import Drafter, DraftTree, Ints, Logprobs, Verdict
from outrider.drafters.sequence import Finish
from outrider.verify.budget import FixedBudget, MeasuredBudget, Offer, Selection
from outrider.verify.constraints.reasoning import Constraint
from outrider.verify.cost import CostCurve
from outrider.verify.sampling_params import SamplingParams
from outrider.verify.verifier import Verifier


class PromptError(ValueError):
    """The prompt cannot be decoded; the message says why."""


@dataclass(frozen=True)
class DecodeOptions:
    """Parameters and limits of one answer."""

    params: SamplingParams
    max_tokens: int
    stop_ids: frozenset[int] = frozenset()
    max_nodes: int = 24  # draft nodes per step; 0 = plain decoding
    curve: CostCurve | None = None  # chooses the number of nodes by their cost; overrides `max_nodes`
    prediction: tuple[int, ...] = ()  # token ids of the output that the client expects
    scores_prompt: bool = False  # also compute the log-probabilities of the prompt's tokens


@dataclass(frozen=True)
class Drafted:
    """What the drafter proposes for one step."""

    tree: DraftTree
    depth: int  # of the deepest node that the step may verify
    seconds: float


@dataclass(frozen=True)
class Plan:
    """The nodes that one step verifies."""

    drafted: Drafted
    selection: Selection
    tree: DraftTree  # the selected part that the grammar allows
    allowed: NDArray[np.bool_] | None  # bool [N+1, V]; the grammar's mask


@dataclass(frozen=True)
class Step:
    """One step's outcome: no tokens while the prompt is read or if none are requested, otherwise at least one."""

    tokens: list[int]
    finish: Finish | None = None
    tree: DraftTree | None = None  # None while the prompt is read
    logprobs: Logprobs | None = None  # if the request asks for them
    accepted: Ints = field(default_factory=lambda: np.empty(0, np.int32))  # int32 [A]; rows of `tree`
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    commit_seconds: float = 0.0


class Generation:
    """One answer. Take part in rounds (`outrider.verify.round`) until a step has a `finish`, and call `close` in any case."""

    def __init__(
        self, verifier: Verifier, drafter: Drafter, prompt: Ints, options: DecodeOptions, grammar: Constraint | None = None
    ) -> None:
        """`prompt` is int32 [P], P >= 1; `grammar` is at its start, and may be any constraint.

        Raises PromptError if the prompt does not fit.
        """
        if not len(prompt):
            raise PromptError("The prompt is empty; give at least one token.")
        if len(prompt) >= verifier.context_tokens:
            raise PromptError("The prompt fills the whole context; shorten it.")
        params = options.params
        if grammar is not None:
            params = replace(params, rule="keyed")  # a draft that a grammar has filtered is not a valid sample
        stop_ids = frozenset[int]() if params.ignore_eos else options.stop_ids
        max_tokens = min(options.max_tokens, verifier.context_tokens - len(prompt))
        self.verifier = verifier
        self._drafter = drafter
        self._grammar = grammar
        self._budget = MeasuredBudget(options.curve) if options.curve else FixedBudget(options.max_nodes)
        self._sequence = verifier.sequence
        self.reused_tokens = verifier.begin(prompt, params, max_tokens, stop_ids, options.scores_prompt)
        drafter.begin(self._sequence, np.array(options.prediction, np.int32), params)

    @property
    def curve(self) -> CostCurve | None:
        """The machine's cost curve, if it chooses the nodes."""
        return self._budget.curve if isinstance(self._budget, MeasuredBudget) else None

    @property
    def remaining(self) -> int:
        """The number of tokens that the answer may still have."""
        return self._sequence.remaining

    @property
    def context(self) -> int:
        """The number of tokens so far."""
        return len(self._sequence)

    @property
    def read_tokens(self) -> int:
        """The number of the text's tokens that have been read."""
        return self.context - self.verifier.unread

    def draft(self) -> Drafted:
        """Asks the drafter for a step's draft. The prompt has been read."""
        started = time.perf_counter()
        # The bonus token follows the deepest accepted node.
        depth = min(self.remaining - 1, self.verifier.draft_depth)
        tree = self._drafter.propose(self._budget.nodes() if depth else 0).limit(depth)
        return Drafted(tree, depth, time.perf_counter() - started)

    def offer(self, drafted: Drafted) -> Offer:
        """The draft as one that shares a round with others."""
        return Offer(drafted.tree, self._budget, self.context, self._drafter.prunable)

    def plan(self, drafted: Drafted, selection: Selection) -> Plan:
        """Restricts the selected nodes to those that the grammar allows."""
        if self._grammar is None:
            return Plan(drafted, selection, selection.tree, None)
        tree, allowed = self._grammar.visit(selection.tree, drafted.depth)
        return Plan(drafted, selection, tree, allowed)

    def complete(self, plan: Plan, logits: torch.Tensor, forward_seconds: float) -> Step:
        """Judges the plan's tree by its logits [N+1, V], cuts the verdict where the answer ends, and commits it."""
        started = time.perf_counter()
        verdict = self.verifier.judge(plan.tree, logits, self._drafter.feedback, plan.allowed)
        verified = time.perf_counter()
        verdict = replace(verdict, seconds=forward_seconds + verified - started)
        verdict = verdict.cut(self._sequence.admits(verdict.tokens))
        self._commit(plan, verdict)
        return Step(
            verdict.tokens.tolist(),
            self._sequence.finish,
            plan.tree,
            verdict.logprobs,
            verdict.rows,
            draft_seconds=plan.drafted.seconds,
            verify_seconds=verdict.seconds,
            commit_seconds=time.perf_counter() - verified,
        )

    def _commit(self, plan: Plan, verdict: Verdict) -> None:
        """Appends the verdict's tokens to the text; updates grammar, drafter and budget."""
        self.verifier.commit(verdict)
        if self._grammar is not None:
            self._grammar.commit(verdict.tokens)
        self._drafter.observe(verdict)
        self._budget.record(plan.drafted.tree, plan.selection, verdict.tokens, plan.drafted.seconds)

    @property
    def prompt_logprobs(self) -> Logprobs | None:
        """Log-probabilities of the prompt's tokens except the first, once the prompt is read; None if not requested."""
        return self.verifier.prompt_logprobs

    def take_back(self, count: int) -> None:
        """Drops the last `count` emitted tokens: the text ends before them."""
        self.verifier.truncate(len(self._sequence) - count)

    def close(self) -> None:
        """Ends the request for the drafter; the verifier keeps the committed text for the session's next request."""
        self._drafter.end()
