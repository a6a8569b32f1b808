"""A draft model's chain of tokens that are expected to follow the committed text, drafted before or beside a verification.

A verification that emits tokens of the chain leaves the rest of it for the next step; otherwise the chain is dropped. Beside a
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
from itertools import accumulate
from operator import mul
from typing import Any, Self

import numpy as np

from outrider.drafters.interface import EMPTY, DraftTree, Draws, Floats, Ints, Sampling, Source, Verdict
from outrider.drafters.model.language_model import Candidates, LanguageModel
from outrider.drafters.model.pair import FEW_TOKENS, Pair
from outrider.drafters.options import MAX_WINDOW
from outrider.drafters.sequence import Sequence

# Nodes of a guide with a lower path probability are not checked.
LEAST_GUESS = 0.25


@dataclass
class Link:
    """One token of the chain."""

    token: int
    share: float  # the model's probability
    q: Floats | None  # float32 [V]; the distribution that it was sampled from; None if the rule needs none
    others: list[tuple[int, float]]  # the model's next choices and their probabilities
    position: int = 0  # among the tokens of its forward


class ModelChain:
    """The chain of one session. `draft_beside` starts drafting that ends in `observe` or `end`."""

    def __init__(self, model: LanguageModel, pair: Pair, choices: int = 1, window: int = 0) -> None:
        """More `choices` add the model's next ones beside each token of the chain.

        `window` is the number of tokens that are drafted beside a verification; 0 = all that fit into its time.
        """
        self._model = model
        self._pair = pair
        self._choices = choices
        self._window = window
        self._acceptance = pair.acceptance(True)
        self._sequence = Sequence()
        self._links: list[Link] = []  # the model has rows for all but the last one
        self._waited_seconds = 0.0  # seconds that the target has waited for the draft model
        self._background: Future[None] | None = None
        self._verified = threading.Event()  # ends background drafting

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A new chain, because the model may be drafting."""
        return type(self)(copy.deepcopy(self._model, memo), self._pair, self._choices, self._window)

    def __len__(self) -> int:
        return len(self._links)

    @property
    def tokens(self) -> list[int]:
        """The tokens of the chain, which are not emitted yet."""
        return [link.token for link in self._links]

    @property
    def unread(self) -> int:
        """The number of the text's tokens that the model reads before it drafts."""
        return self._model.unread

    def checked(self, tables: DraftTree) -> DraftTree:
        """The tree whose likeliest path the model's forwards also check: the tables', unless it drafts as fast."""
        return EMPTY if self._model.is_sequential else tables

    @property
    def can_grow(self) -> bool:
        """Whether the model can draft a further token."""
        return self._model.space > 0

    @property
    def path(self) -> float:
        """The estimated probability that the whole chain is accepted."""
        return self._paths()[-1] if self._links else 1.0

    def start(self, sequence: Sequence, sampling: Sampling | None = None) -> None:
        """Starts a request. Nothing is read yet."""
        self._stop()
        self._waited_seconds = 0.0
        self._links.clear()
        self._acceptance = self._pair.acceptance(sampling is None or sampling.greedy)
        self._sequence = sequence
        self._model.begin(sequence, sampling)

    def read(self, tokens: int) -> None:
        """Has the draft model read up to `tokens` unread tokens of the text."""
        started = time.perf_counter()
        if read := self._model.read(tokens):
            self._pair.record_reading(read, time.perf_counter() - started)

    def extend(self, most: int, guide: DraftTree = EMPTY) -> None:
        """Adds the tokens of one forward, at most `most`.

        `guide` is a tree of other drafts: the forward also checks its likeliest path.
        """
        unread, started = self._model.unread, time.perf_counter()
        self._forward(min(most, self._model.space) - 1, guide)
        if unread <= FEW_TOKENS:
            self._pair.record_forward(len(self._sequence), time.perf_counter() - started, beside=False)

    def draft_beside(self, step_seconds: float, guide: DraftTree = EMPTY) -> None:
        """Starts drafting what the model can draft beside a step of `step_seconds` seconds, and the guide's path."""
        self._verified.clear()
        fitting = self._pair.tokens_beside(step_seconds, len(self._sequence))
        count = self._window or max(self._pair.block, min(MAX_WINDOW, round(fitting)))
        most = len(self) + count + len(guide.likeliest(()))
        self._background = self._model.submit(lambda: self._draft_until_verified(most, guide))

    def tree(self, budget: int) -> DraftTree:
        """The first tokens of the chain, at most `budget` nodes."""
        links, paths = self._links[:budget], self._paths()
        length = len(links)
        if not length:
            return replace(EMPTY, continuation=self._continuation)
        # Depth-first: the chain, then the other choices next to its tokens from its end upwards.
        branches = [(row, rank, *other) for row, link in enumerate(links) for rank, other in enumerate(link.others, start=1)]
        branches = sorted(branches[: budget - length], key=lambda branch: -branch[0])
        above = [1.0, *paths]
        return DraftTree(
            np.array([link.token for link in links] + [token for _, _, token, _ in branches], np.int32),
            np.array([*range(-1, length - 1), *(row - 1 for row, *_ in branches)], np.int32),
            np.array([*range(1, length + 1), *(row + 1 for row, *_ in branches)], np.int32),
            np.array(
                paths[:length]
                + [above[row] * self._acceptance.calibration.acceptance(rank, share) for row, rank, _, share in branches],
                np.float32,
            ),
            np.full(length + len(branches), Source.DRAFT, np.uint8),
            {row - 1: Draws(link.q, (row,)) for row, link in enumerate(links) if link.q is not None},
            self._continuation,
        )

    def observe(self, verdict: Verdict) -> list[tuple[int, bool]]:
        """Ends background drafting, and keeps what is left of the chain. Raises if drafting has failed.

        Returns the position, and whether the token was right, for each token of the chain up to the first wrong one.
        """
        tokens = verdict.tokens
        drafting = self._stop()
        if drafting is not None:
            drafting.result()
        self._model.advance(tokens)
        found = self._learn(tokens)
        if self.tokens[: len(tokens)] == tokens.tolist():
            del self._links[: len(tokens)]
        else:
            self._links.clear()
        return found

    def take_waited_seconds(self) -> float:
        """Seconds that the target has waited for the draft model since the last call."""
        waited, self._waited_seconds = self._waited_seconds, 0.0
        return waited

    def end(self) -> None:
        """Ends the request, also after a failure. A draft that fails without a step to report it affects no answer."""
        self._stop()
        self._links.clear()

    def _paths(self) -> list[float]:
        """The estimated probability that each token of the chain and all before it are accepted."""
        return list(accumulate((self._acceptance.calibration.acceptance(0, link.share) for link in self._links), mul))

    def _draft_until_verified(self, most: int, guide: DraftTree) -> None:
        """Extends the chain to `most` tokens, forward by forward, until the verifier is done."""
        is_first = True
        while len(self) < most and self._model.space and (is_first or not self._verified.is_set()):
            unread, started = self._model.unread, time.perf_counter()
            self._forward(min(most - len(self), self._model.space) - 1, guide)
            if unread <= FEW_TOKENS and not self._verified.is_set():
                self._pair.record_forward(len(self._sequence), time.perf_counter() - started, beside=True)
            is_first = False

    def _forward(self, most: int, guide: DraftTree) -> None:
        """Adds the tokens of one forward of the model, which also checks at most `most` tokens of the guide.

        A block has at most `most` tokens after its first.
        """
        tokens = self.tokens
        if not tokens:
            guessed, candidates = [], self._model.root(self._choices)
        else:
            guessed = guide.likeliest(tokens, LEAST_GUESS)[: max(0, most)]
            parents = range(len(tokens) - 1, len(tokens) + len(guessed))
            candidates = self._model.expand([tokens[-1], *guessed], parents, self._choices)
        choices = candidates.tokens[:, 0].tolist()
        correct = next((index for index, token in enumerate(guessed) if choices[index] != token), len(guessed))
        first = self._links[-1].position + 1 if tokens and self._pair.block > 1 else 0
        self._links += [link(candidates, row, first + row) for row in range(correct + 1) if candidates.probability[row, 0] > 0]
        if correct < len(guessed):
            self._model.retract(len(self))  # the last token is not a row yet
        limit = len(tokens) + 1 + most
        while self._links and self._links[-1].position + 1 < self._pair.block and len(self) < limit and self._model.space:
            candidates = self._model.expand([self._links[-1].token], [len(self) - 1], self._choices)  # no forward
            self._links.append(link(candidates, 0, self._links[-1].position + 1))

    def _stop(self) -> Future[None] | None:
        """Ends background drafting, waits for it and returns its outcome; None if there was none. Raises nothing."""
        self._finish_forward()
        background, self._background = self._background, None
        return background

    def _finish_forward(self) -> None:
        """Ends background drafting after the forward that is running."""
        self._verified.set()
        if self._background is not None:
            started = time.perf_counter()
            wait([self._background])
            self._waited_seconds += time.perf_counter() - started

    def _continuation(self, path: Collection[int]) -> tuple[int, Floats] | None:
        """The chain's token after `path`, maybe sampled during the verification, and its distribution.

        Waits for the running forward, as `observe` would: using only tokens that happen to be ready would bias the sample.
        """
        length, tokens = len(path), list(path)
        known = self.tokens[:length]
        if known != tokens[: len(known)]:
            return None
        self._finish_forward()
        if length >= len(self) or self.tokens[:length] != tokens:
            return None
        found = self._links[length]
        return None if found.q is None else (found.token, found.q)

    def _learn(self, tokens: Ints) -> list[tuple[int, bool]]:
        """Records how far the chain agreed with the emitted tokens; see `observe`."""
        found: list[tuple[int, bool]] = []
        for token, drafted in zip(tokens.tolist(), self._links, strict=False):
            choices = [drafted.token, *(choice for choice, _ in drafted.others)]
            accepted = choices.index(token) if token in choices else None
            shares = [drafted.share, *(share for _, share in drafted.others)]
            self._acceptance.calibration.record(range(len(choices)), shares, accepted)
            found.append((drafted.position, accepted == 0))
            if accepted != 0:
                break
        return found


def link(candidates: Candidates, row: int, position: int) -> Link:
    """The first candidate of a row, with the other ones."""
    tokens, shares = candidates.tokens[row].tolist(), candidates.probability[row].tolist()
    others = [(token, share) for token, share in zip(tokens[1:], shares[1:], strict=True) if token != tokens[0] and share > 0]
    return Link(tokens[0], shares[0], None if candidates.q is None else candidates.q[row], others, position)
