"""A draft model's chain of tokens that are expected to follow the committed text, drafted before or during a verification.

A verification that emits tokens of the chain leaves the rest of it for the next step; otherwise the chain is dropped. During a
verification the model drafts in its own thread, forward by forward, until the verifier is done.

Only token ids and accepted counts cross between the two models; under the rule `rejection` also the distributions that the
tokens were sampled from. Then the target's last distribution accepts or rejects the next token of the chain, which may have
been sampled while the target ran, by the same rule as the tokens before it.

The length of a chain depends on timing, so under the rule `rejection` a seed does not reproduce an answer.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Collection
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from outrider.drafters.interface import EMPTY, DraftTree, Draws, Floats, Ints, Sampling, Source, Verdict
from outrider.drafters.model.language_model import Candidates, LanguageModel
from outrider.drafters.model.ngram_predraft import NgramPredraft
from outrider.drafters.options import MAX_WINDOW, PearlOptions
from outrider.drafters.policy import Calibration, ema
from outrider.drafters.sequence import Sequence
from outrider.drafters.state import State, join, loaded_means, means, part


@dataclass
class Link:
    """One token of the chain."""

    token: int
    share: float  # the model's probability
    q: Floats | None  # float32 [V]; the distribution that it was sampled from; None if the rule needs none
    second: tuple[int, float] | None  # the model's second choice and its probability


class ModelChain:
    """The chain of one session. `draft_during` starts drafting that ends in `observe` or `end`."""

    def __init__(self, model: LanguageModel, options: PearlOptions, choices: int = 1) -> None:
        """Two `choices` add the model's second choice next to each token of the chain."""
        self._model = model
        self._options = options
        self._choices = choices
        self._calibration = Calibration(choices)
        self._links: list[Link] = []  # the model has rows for all but the last one
        self._predraft = NgramPredraft(options.ahead)
        self._draft_seconds: float | None = None  # seconds per drafted token (EMA)
        self._verify_seconds: float | None = None  # seconds per verification (EMA)
        self._waited_seconds = 0.0  # seconds that the current verification has waited for the draft model
        self._background: Future[None] | None = None
        self._verified = threading.Event()  # ends background drafting

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A new chain with what this one has learned, because the model may be drafting."""
        forked = type(self)(copy.deepcopy(self._model, memo), self._options, self._choices)
        forked.load({name: array.copy() for name, array in self.state().items()}, Sequence())
        return forked

    def state(self) -> State:
        parts = join(calibration=self._calibration.state(), predraft=self._predraft.state())
        return {"seconds": means(self._draft_seconds, self._verify_seconds), **parts}

    def load(self, saved: State, text: Sequence) -> None:
        self._draft_seconds, self._verify_seconds = loaded_means(saved, "seconds", 2)
        self._calibration.load(part(saved, "calibration"))
        self._predraft.load(part(saved, "predraft"))

    def __len__(self) -> int:
        return len(self._links)

    @property
    def tokens(self) -> list[int]:
        """The tokens of the chain, which are not emitted yet."""
        return [link.token for link in self._links]

    @property
    def window(self) -> int:
        """The number of tokens that are drafted in the time of one verification."""
        if self._options.window:
            return self._options.window
        draft, verify = self._draft_seconds or 0.0, self._verify_seconds or 0.0
        ratio = verify / draft if draft > 0 and verify > 0 else self._model.speed_ratio
        return max(1, min(MAX_WINDOW, round(ratio)))

    @property
    def draft_seconds(self) -> float | None:
        """The time to draft a token; None if it has not been measured."""
        return self._draft_seconds

    def start(self, sequence: Sequence, sampling: Sampling | None = None) -> None:
        """Starts a request, also after its first tokens."""
        self._stop()
        self._links.clear()
        self._model.submit(lambda: self._model.begin(sequence, sampling)).result()
        self._predraft.learn(sequence.tokens.tolist())

    def draft(self, count: int, least: float = 0.0, guide: DraftTree = EMPTY) -> None:
        """Drafts `count` more tokens at once, or until the chain's probability is below `least`.

        `guide` is a tree of other drafts: the model's forwards also check its likeliest path.
        """
        self._verified.clear()
        self._extend(count, least, guide)

    def draft_during(self, guide: DraftTree = EMPTY) -> None:
        """Starts drafting in the background what the model can draft in the time of a verification, and the guide's path."""
        self._verified.clear()
        count = self.window + len(guide.likeliest(()))
        self._background = self._model.submit(lambda: self._extend(count, 0.0, guide))

    def tree(self, budget: int) -> DraftTree:
        """The first tokens of the chain, at most `budget` nodes."""
        links, paths = self._links[:budget], self._paths()
        length = len(links)
        if not length:
            return replace(EMPTY, continuation=self._continuation)
        # Depth-first: the chain, then the second choices next to its tokens from its end upwards.
        branches = [(row, *link.second) for row, link in enumerate(links[: budget - length]) if link.second is not None][::-1]
        above = [1.0, *paths]
        return DraftTree(
            np.array([link.token for link in links] + [token for _, token, _ in branches], np.int32),
            np.array([*range(-1, length - 1), *(row - 1 for row, _, _ in branches)], np.int32),
            np.array([*range(1, length + 1), *(row + 1 for row, _, _ in branches)], np.int32),
            np.array(
                paths[:length] + [above[row] * self._calibration.acceptance(1, share) for row, _, share in branches], np.float32
            ),
            np.full(length + len(branches), Source.DRAFT, np.uint8),
            {row - 1: Draws(link.q, (row,)) for row, link in enumerate(links) if link.q is not None},
            self._continuation,
        )

    def observe(self, verdict: Verdict) -> None:
        """Ends background drafting and keeps what is left of the chain. Raises if drafting has failed."""
        tokens = verdict.tokens
        self._verified.set()
        advanced = self._model.submit(lambda: self._model.advance(tokens))  # runs after the current forward
        if (drafting := self._stop()) is not None:
            drafting.result()
        self._learn(tokens)
        self._predraft.learn(tokens.tolist())
        if self.tokens[: len(tokens)] == tokens.tolist():
            del self._links[: len(tokens)]
        else:
            self._links.clear()
        self._verify_seconds = ema(self._verify_seconds, verdict.seconds - self._waited_seconds)
        self._waited_seconds = 0.0
        advanced.result()

    def end(self) -> None:
        """Ends the request, also after a failure. A draft that fails without a step to report it affects no answer."""
        self._stop()
        self._links.clear()

    def _paths(self) -> list[float]:
        """The estimated probability that each token of the chain and all before it are accepted."""
        paths, path = [], 1.0
        for link in self._links:
            path *= self._calibration.acceptance(0, link.share)
            paths.append(path)
        return paths

    def _extend(self, count: int, least: float, guide: DraftTree) -> None:
        """Extends the chain forward by forward until it has `count` more tokens or the verifier is done."""
        length, drafted = len(self) + count, 0
        while len(self) < length and self._model.space and not (drafted and self._verified.is_set()):
            if least and self._links and self._paths()[-1] < least:
                break
            started = time.perf_counter()
            added = self._forward(min(length - len(self), self._model.space) - 1, guide)
            self._draft_seconds = ema(self._draft_seconds, (time.perf_counter() - started) / added)
            drafted += added

    def _forward(self, max_predraft: int, guide: DraftTree) -> int:
        """Runs one forward of the model; returns the number of tokens that it adds to the chain."""
        tokens = self.tokens
        if not tokens:
            predraft, candidates = [], self._model.root(self._choices)
        else:
            predraft = self._readable(self._predraft.guess(tokens, guide))[:max_predraft]
            parents = range(len(tokens) - 1, len(tokens) + len(predraft))
            candidates = self._model.expand([tokens[-1], *predraft], parents, self._choices)
        choices = candidates.tokens[:, 0].tolist()
        correct = next((index for index, token in enumerate(predraft) if choices[index] != token), len(predraft))
        self._links += [link(candidates, row) for row in range(correct + 1)]
        if correct < len(predraft):
            self._model.retract(len(self))  # the last token is not a row yet
        self._predraft.record(len(predraft), correct)
        return correct + 1

    def _readable(self, tokens: list[int]) -> list[int]:
        """The tokens before the first one that the model does not know."""
        vocabulary = self._model.vocabulary
        return tokens[: next((index for index, token in enumerate(tokens) if token >= vocabulary), None)]

    def _stop(self) -> Future[None] | None:
        """Ends background drafting, waits for it and returns its outcome; None if there was none. Raises nothing."""
        self._finish_forward()
        background, self._background = self._background, None
        return background

    def _finish_forward(self) -> None:
        """Ends background drafting after the forward that is running."""
        self._verified.set()
        if self._background is not None:
            wait([self._background])

    def _continuation(self, path: Collection[int]) -> tuple[int, Floats] | None:
        """The chain's token after `path`, maybe sampled during the verification, and its distribution.

        Waits for the running forward, as `observe` would: using only tokens that happen to be ready would bias the sample.
        """
        length, tokens = len(path), list(path)
        known = self.tokens[:length]
        if known != tokens[: len(known)]:
            return None
        started = time.perf_counter()
        self._finish_forward()
        self._waited_seconds += time.perf_counter() - started
        if length >= len(self) or self.tokens[:length] != tokens:
            return None
        found = self._links[length]
        return None if found.q is None else (found.token, found.q)

    def _learn(self, tokens: Ints) -> None:
        """Records how far the chain agreed with the emitted tokens."""
        for token, drafted in zip(tokens.tolist(), self._links, strict=False):
            second = () if drafted.second is None else (drafted.second,)
            choices = [drafted.token, *(choice for choice, _ in second)]
            accepted = choices.index(token) if token in choices else None
            self._calibration.record(range(len(choices)), [drafted.share, *(share for _, share in second)], accepted)
            if accepted != 0:
                return


def link(candidates: Candidates, row: int) -> Link:
    """The first candidate of a row, with the second one if it has another."""
    tokens, shares = candidates.tokens[row].tolist(), candidates.probability[row].tolist()
    second = (tokens[1], shares[1]) if len(tokens) > 1 and tokens[1] != tokens[0] and shares[1] > 0 else None
    return Link(tokens[0], shares[0], None if candidates.q is None else candidates.q[row], second)
