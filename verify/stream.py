"""One running answer, from its prompt to its last token, step by step.

A step has phases, `draft`, `rows`, `judge` and `accept`, so that `outrider.verify.round` computes the forward of several
streams' steps at once. What one phase finds is a value that the next one gets. Works on token ids; knows nothing about text.
"""

from __future__ import annotations

import time
from collections.abc import Sequence, Sized
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from outrider.drafters.interface import MAX_NODES, Corpora, Drafter, DraftTree, Ints, Logprobs
from outrider.drafters.sequence import Finish
from outrider.verify.budget import Budget, Choice, Draft
from outrider.verify.constraints.reasoning import Constraint
from outrider.verify.cost import CostCurve
from outrider.verify.model.batch import Segment
from outrider.verify.sampling.rows import Logits
from outrider.verify.sampling_params import SamplingParams
from outrider.verify.verifier import PREFILL_CHUNK_TOKENS, Judgement, Verifier

if TYPE_CHECKING:
    from outrider.verify.model.adapter import Adapter
    from outrider.verify.model.pictures import Picture
    from outrider.verify.sampling.device import Together


class PromptError(ValueError):
    """The prompt cannot be decoded; the message says why."""


def check_prompt(prompt: Sized, context_tokens: int) -> None:
    """Raises PromptError if the prompt does not fit."""
    if not len(prompt):
        raise PromptError("The prompt is empty; give at least one token.")
    if len(prompt) >= context_tokens:
        raise PromptError("The prompt fills the whole context; shorten it.")


@dataclass(frozen=True)
class DecodeOptions:
    params: SamplingParams
    max_tokens: int
    stop_ids: frozenset[int] = frozenset()
    max_nodes: int = 24  # draft nodes per step; 0 = plain decoding
    curve: CostCurve | None = None  # chooses the number of nodes by their cost; overrides `max_nodes`
    prediction: tuple[int, ...] = ()  # token ids of the output that the client expects
    wants_prompt_logprobs: bool = False  # also compute the log-probabilities of the prompt's tokens
    adapter: Adapter | None = None  # of the target; the same for all requests of a session
    pictures: Sequence[Picture] = ()  # in the prompt, in its order
    corpora: Corpora | None = None  # what the drafter reads instead of its own corpora


@dataclass(frozen=True)
class Part:
    """A stream's part of one forward: a chunk of its prompt, or a step (`StepPart`)."""

    segment: Segment


@dataclass(frozen=True)
class StepPart(Part):
    """The rows of a step: the root and the chosen nodes that the grammar allows."""

    draft: Draft
    choice: Choice
    tree: DraftTree
    allowed: NDArray[np.bool_] | None  # bool [N+1, V]; the grammar's mask


@dataclass(frozen=True)
class Step:
    """One step's outcome: no tokens while the prompt is read or if none are requested, otherwise at least one."""

    tokens: list[int]
    finish: Finish | None = None
    tree: DraftTree | None = None  # None while the prompt is read
    choice: Choice | None = None  # why these nodes were verified
    logprobs: Logprobs | None = None  # if the request asks for them
    path: Ints = field(default_factory=lambda: np.empty(0, np.int32))  # int32 [A]; the accepted nodes of `tree`
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    commit_seconds: float = 0.0


class Stream:
    """One running answer: a verifier, which has its text, a drafter, a node budget, and maybe a grammar.

    First its prompt is read: `chunk` and `commit_chunk`, until the verifier's `unread_prompt` is 0. Then come steps: `draft`,
    `rows`, `judge` and `accept`, until one has a `finish`. At the end comes `close`, also after an error.
    """

    def __init__(
        self, verifier: Verifier, drafter: Drafter, prompt: Ints, options: DecodeOptions, grammar: Constraint | None = None
    ) -> None:
        """`prompt` is int32 [P], P >= 1. No token has been committed to `grammar` yet.

        Raises PromptError if the prompt does not fit.
        """
        check_prompt(prompt, verifier.runner.context_tokens)
        params = options.params.for_prompt(len(prompt))
        if grammar is not None:
            params = replace(params, rule="keyed")  # a draft that a grammar has filtered is not a valid sample
        stop_ids = frozenset[int]() if params.ignore_eos else options.stop_ids
        max_tokens = min(options.max_tokens, verifier.runner.context_tokens - len(prompt))
        self.budget = Budget(options.max_nodes, options.curve)
        self.verifier = verifier
        self._drafter = drafter
        self._grammar = grammar
        self._sequence = verifier.sequence
        scored, pictures = options.wants_prompt_logprobs, options.pictures
        self.reused_tokens = verifier.begin(prompt, params, max_tokens, stop_ids, scored, options.adapter, pictures)
        drafter.begin(self._sequence, np.array(options.prediction, np.int32), params, options.corpora)

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
        return self.context - self.verifier.unread_prompt

    @property
    def most_rows(self) -> int:
        """The most rows that the next round computes of this stream."""
        return PREFILL_CHUNK_TOKENS if self.verifier.unread_prompt else MAX_NODES + 1

    def chunk(self, tokens: int) -> Part | None:
        """The next chunk of the prompt, at most `tokens` long; None once all is read."""
        segment = self.verifier.chunk(tokens)
        return None if segment is None else Part(segment)

    def commit_chunk(self, part: Part, logits: Logits) -> Step:
        """Keeps the rows of a chunk after its forward."""
        self.verifier.commit_chunk(part.segment, logits)
        return Step([])

    def draft(self) -> Draft:
        """Asks the drafter for a step's draft. The prompt has been read, and the answer may have more tokens."""
        started = time.perf_counter()
        depth = min(
            self.remaining - 1, self.verifier.runner.draft_depth(self.verifier.cache.length)
        )  # leaves room for the bonus token
        nodes = self.budget.nodes() if depth else 0
        proposed = self._drafter.propose(nodes, self.budget.least(self.context) if nodes else 0.0)
        tree = proposed.limit(depth)
        seconds = time.perf_counter() - started
        return Draft(tree, depth, seconds, self.context, self._drafter.prunable, nodes, proposed.work)

    def rows(self, draft: Draft, choice: Choice) -> StepPart:
        """The rows of a step: the root and those of the chosen nodes that the grammar allows."""
        tree, allowed = choice.tree, None
        if self._grammar is not None:
            tree, allowed = self._grammar.visit(tree, draft.depth)
        return StepPart(self.verifier.segment(tree), draft, choice, tree, allowed)

    def judge(self, part: StepPart, logits: Logits, together: Together | None = None) -> Judgement:
        """Starts to judge a step by its logits [N+1, V].

        Where drafting does not pay, ranking the likeliest tokens for the drafter does not pay, either.
        """
        feedback = self._drafter.feedback if part.draft.nodes else 0
        return self.verifier.judge(part.tree, logits, feedback, part.allowed, together)

    def accept(self, part: StepPart, judgement: Judgement, forward_seconds: float) -> Step:
        """Waits for the verdict of a step, and commits the tokens up to the end of the answer.

        The grammar, the drafter and the budget learn the outcome.
        """
        started = time.perf_counter()
        verdict = judgement.verdict()
        verified = time.perf_counter()
        verdict = replace(verdict, seconds=forward_seconds + verified - started)
        verdict = verdict.cut(self._sequence.admits(verdict.tokens))
        self.verifier.commit(verdict)
        ended = self._grammar is not None and self._grammar.commit(verdict.tokens)
        self._drafter.observe(verdict)
        self.budget.record(part.draft.tree, part.choice, verdict.tokens, part.draft.seconds)
        return Step(
            verdict.tokens.tolist(),
            "stop" if ended else self._sequence.finish,
            part.tree,
            part.choice,
            verdict.logprobs,
            verdict.path,
            draft_seconds=part.draft.seconds,
            verify_seconds=verdict.seconds,
            commit_seconds=time.perf_counter() - verified,
        )

    def take_back(self, count: int) -> None:
        """Drops the last `count` emitted tokens: the text ends before them."""
        self.verifier.truncate(len(self._sequence) - count)

    def close(self) -> None:
        """Ends the request for the drafter; the verifier keeps the committed text for the session's next request."""
        self._drafter.end()
