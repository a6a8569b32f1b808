"""A drafter and the text that it reads: what a program needs to draft for one conversation. Knows nothing about models."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from outrider.drafters.interface import EMPTY, MAX_NODES, Drafter, DraftTree, Floats, Ints, Sampling, Verdict
from outrider.drafters.options import DrafterName
from outrider.drafters.registry import Resources, arrays_of, clone, load, make
from outrider.drafters.sequence import Sequence
from outrider.drafters.state import State, array, part
from outrider.drafters.tables.suffix import Corpus, index

# A chain of n tokens is the likeliest path of a tree with this many times n nodes: the path of a smaller tree is often shorter.
TREE_PER_CHAIN = 4
NO_IDS: Ints = np.empty((0, 0), np.int32)
NO_PROBS: Floats = np.empty((0, 0), np.float32)


class Session:
    """Drafts for one conversation, whose requests come one after another.

    Calls come in the order begin, (propose or propose_chain, observe)*, end; `begin` may also follow without `end`. What a
    session learns is kept between requests, and a prompt that begins with the last text is read from its first new token on.
    Not thread-safe. A copy (`copy.deepcopy`) is a session that has learned the same.
    """

    def __init__(self, drafter: DrafterName = "fusion", resources: Resources | None = None, state: State | None = None) -> None:
        """Drafts with `resources`, or without tables; continues from a saved `state`.

        Raises ValueError if there is no such drafter, and StateError, which is one, if the state is not this drafter's.
        """
        resources = resources or Resources()
        if drafter not in resources.names:
            raise ValueError(f"There is no drafter {drafter!r} here; choose one of {', '.join(resources.names)}.")
        self._sequence = Sequence()
        self._tree = EMPTY
        self._running = False
        if state is None:
            self._drafter: Drafter = make(drafter, resources)
        else:
            self._sequence.begin(array(state, "text", np.int32, None))
            self._drafter = load(drafter, resources, part(state, "drafter"), self._sequence)

    @property
    def tokens(self) -> Ints:
        """The text so far, int32 [T]: a view that the next call may change."""
        return self._sequence.tokens

    @property
    def feedback(self) -> int:
        """How many of the target's likeliest tokens per node `observe` can use; 0 = none."""
        return self._drafter.feedback

    def begin(self, prompt: ArrayLike, prediction: ArrayLike = (), sampling: Sampling | None = None) -> None:
        """Starts a request with this text, token ids [P]; `prediction`, token ids [M], is the answer that the client expects.

        `sampling` is how the target samples with keyed noise; None = greedy, or with other noise.
        """
        self.end()
        self._sequence.begin(np.asarray(prompt, np.int32))
        self._drafter.begin(self._sequence, np.asarray(prediction, np.int32), sampling)
        self._running = True

    def propose(self, nodes: int, least: float = 0.0, depth: int = MAX_NODES) -> DraftTree:
        """At most `nodes` nodes below the last token and none below `depth`; empty without a guess.

        Each has a path probability above `least`, unless the drafter's trees cannot be cut.
        """
        tree = self._drafter.propose(min(nodes, MAX_NODES), least)
        if least and self._drafter.prunable:
            tree = tree.keep(tree.probability > least)
        self._tree = tree.limit(depth)
        return self._tree

    def propose_chain(self, length: int, least: float = 0.0) -> DraftTree:
        """The likeliest path below the last token, at most `length` tokens long: a tree without branches.

        Each node has a path probability of at least `least`. Raises ValueError for a drafter whose trees cannot be cut.
        """
        if not self._drafter.prunable:
            raise ValueError("This drafter drafts no chains; choose another one, or propose trees.")
        # Not with `least`: a search that knows it does not look below nodes whose children would seldom be above it.
        tree = self.propose(TREE_PER_CHAIN * length)
        self._tree = tree.keep(np.arange(len(tree)) < min(length, len(tree.likeliest((), least))))
        return self._tree

    def observe(self, tokens: ArrayLike, top_ids: Ints = NO_IDS, top_probs: Floats = NO_PROBS) -> None:
        """Appends the step's tokens, [A+1]: those of the accepted path, and the target's own after it.

        The target's K likeliest tokens and their probabilities, int32 and float32 [N+1, K], are those at the root, then at
        each node of the last draft, likeliest first. Without them, drafters learn from the text alone.
        """
        emitted, tree = np.ascontiguousarray(tokens, np.int32), self._tree
        self._tree = EMPTY
        self._sequence.append(emitted)
        self._drafter.observe(Verdict(tree, tree.follow(emitted[:-1]), emitted, top_ids, top_probs))

    def read(self, text: ArrayLike) -> None:
        """Observes the new end of a text, token ids [T], for programs that pass all of it at every step.

        A text that does not continue the last one begins a request.
        """
        tokens = np.asarray(text, np.int32)
        known = len(self._sequence)
        if not self._running or not self.continues(tokens):
            self.begin(tokens)
        elif len(tokens) > known:
            self.observe(tokens[known:])

    def continues(self, text: Ints) -> bool:
        """Whether a text, int32 [T], begins with this one."""
        return len(text) >= len(self._sequence) and np.array_equal(text[: len(self._sequence)], self._sequence.tokens)

    def end(self) -> None:
        """Ends the request, finished or cancelled."""
        self._tree = EMPTY
        if self._running:
            self._drafter.end()
        self._running = False

    def state(self) -> dict[str, NDArray[Any]]:
        """The session's learned state and text, from which a new one continues; numpy's `savez` can write it."""
        learned = {f"drafter.{name}": value.copy() for name, value in arrays_of(self._drafter).items()}
        return {"text": self._sequence.tokens.copy(), **learned}

    def __deepcopy__(self, memo: dict[int, Any]) -> Session:
        other = copy.copy(self)
        other._sequence = self._sequence.clone(len(self._sequence))
        other._drafter = clone(self._drafter, self._sequence, other._sequence)
        return other


def index_texts(texts: Iterable[ArrayLike], vocabulary: int) -> Corpus:
    """Texts, each token ids [T] below `vocabulary`, as a corpus in memory."""
    pieces = [np.append(np.asarray(text, np.int64), vocabulary) for text in texts]
    return index(np.concatenate(pieces) if pieces else np.empty(0, np.int64), vocabulary)
