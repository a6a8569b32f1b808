"""The types that every drafter and every verifier speak: DraftTree, Verdict, and the Drafter protocol.

Promises plain numpy data, frozen. Knows nothing about where drafts come from or how they are verified.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]

NOTHING: Ints = np.empty(0, np.int32)
MAX_NODES = 64  # the most nodes one forward verifies


class Source(IntEnum):
    """Which drafter a node came from; the values are stored in `DraftTree.source`."""

    NONE = 0
    TRIGRAM = 1
    RETRIEVAL = 2
    LOOKUP = 3
    LOOKAHEAD = 4
    PREDICTION = 5
    DRAFT = 6
    GRAMMAR = 7
    MERGED = 8  # of a draft model, copied from another branch

    @property
    def label(self) -> str:
        """The name users and metrics see."""
        return self.name.lower()


@dataclass(frozen=True, eq=False)
class DraftTree:
    """Guessed continuations as a tree below the last committed token.

    Nodes stand depth-first, likeliest child first, so that the first n nodes are always a tree of their own and an
    accepted path is usually a prefix.
    """

    tokens: Ints  # int32 [N]
    parents: Ints  # int32 [N]; -1 = child of the last committed token; parents[i] < i
    depths: Ints  # int32 [N]; 1 = child of the last committed token
    probability: Floats  # float32 [N]; estimated probability that the whole path to the node is accepted
    source: NDArray[np.uint8]  # uint8 [N]; a Source
    # Float32 [N+1, V]: what a node's children were drawn from, without replacement, in the order they stand in; entry 0 is
    # the last committed token's, entry i+1 node i's, all zeros where its children are no draws. None where no nodes are.
    q: Floats | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def limit(self, depth: int) -> DraftTree:
        """The tree without its nodes deeper than `depth` tokens."""
        if not len(self) or int(self.depths.max()) <= depth:
            return self
        return self.keep(self.depths <= depth)

    def keep(self, chosen: NDArray[np.bool_]) -> DraftTree:
        """The tree of the nodes where `chosen` (bool [N]) holds; a chosen node's parent must be chosen too."""
        rows = np.cumsum(chosen, dtype=np.int32) - 1
        parents = self.parents[chosen]
        return DraftTree(
            self.tokens[chosen],
            np.where(parents >= 0, rows[parents], -1).astype(np.int32),
            self.depths[chosen],
            self.probability[chosen],
            self.source[chosen],
            None if self.q is None else self.q[np.concatenate([[True], chosen])],
        )

    @cached_property
    def ancestors(self) -> NDArray[np.bool_]:
        """Bool [N+1, N+1]: entry [i, j] says that row i sees row j. Row 0 is the last committed token, row i+1 node i."""
        size = len(self) + 1
        seen = np.eye(size, dtype=np.bool_)
        seen[0, 0] = True
        for row, parent in enumerate((self.parents + 1).tolist(), start=1):
            seen[row] |= seen[parent]
        return seen

    def path(self, row: int) -> list[int]:
        """The tokens from the root's child down to node `row`."""
        found: list[int] = []
        while row >= 0:
            found.append(int(self.tokens[row]))
            row = int(self.parents[row])
        return found[::-1]

    def check(self) -> None:
        """Asserts the invariants named above; for tests."""
        size = len(self)
        assert all(len(a) == size for a in (self.parents, self.depths, self.probability, self.source))
        assert size <= MAX_NODES
        siblings: set[tuple[int, int]] = set()
        for row in range(size):
            parent = int(self.parents[row])
            assert -1 <= parent < row
            above_depth, above_probability = (0, 1.0) if parent < 0 else (self.depths[parent], self.probability[parent])
            assert self.depths[row] == above_depth + 1
            assert 0.0 <= self.probability[row] <= above_probability + 1e-5
            # Depth-first: the parent is the row before, or an ancestor of it.
            before = row - 1
            while before != parent:
                assert before >= 0
                before = int(self.parents[before])
            siblings.add((parent, int(self.tokens[row])))
        assert len(siblings) == size


def common_prefix(left: Ints, right: Ints) -> int:
    """The length of the longest common prefix of two texts, int32 [N] and [M]."""
    size = min(len(left), len(right))
    different = np.flatnonzero(left[:size] != right[:size])
    return int(different[0]) if len(different) else size


def chain(tokens: Ints, probability: Floats, source: Source) -> DraftTree:
    """A tree without branches: int32 [N] tokens with their path probabilities, float32 [N]."""
    size = len(tokens)
    return DraftTree(
        np.asarray(tokens, np.int32),
        np.arange(-1, size - 1, dtype=np.int32),
        np.arange(1, size + 1, dtype=np.int32),
        np.asarray(probability, np.float32),
        np.full(size, source, np.uint8),
    )


EMPTY = chain(NOTHING, np.empty(0, np.float32), Source.NONE)


@dataclass(frozen=True, eq=False)
class Logprobs:
    """Natural logarithms of the target's own probabilities, before any sampling rule, of emitted tokens."""

    chosen: Floats  # float32 [A+1]
    top_ids: Ints  # int32 [A+1, K]; the likeliest tokens there
    top: Floats  # float32 [A+1, K]

    def cut(self, count: int) -> Logprobs:
        """Those of the first `count` tokens."""
        return Logprobs(self.chosen[:count], self.top_ids[:count], self.top[:count])


@dataclass(frozen=True, eq=False)
class Verdict:
    """What the target said about a tree."""

    tree: DraftTree
    rows: Ints  # int32 [A]; the accepted nodes, from the root's child down
    tokens: Ints  # int32 [A+1]; what is emitted: the accepted tokens and the bonus token
    topk_ids: Ints = field(default_factory=lambda: np.empty((0, 0), np.int32))  # int32 [N+1, K], likeliest first
    topk_probs: Floats = field(default_factory=lambda: np.empty((0, 0), np.float32))  # float32 [N+1, K]
    seconds: float = 0.0  # of the target's forward, sampling included
    logprobs: Logprobs | None = None  # where the request asks

    def cut(self, count: int) -> Verdict:
        """The verdict as if only the first `count` emitted tokens had been (a stop inside an accepted block)."""
        if count >= len(self.tokens):
            return self
        logprobs = self.logprobs and self.logprobs.cut(count)
        return replace(self, rows=self.rows[:count], tokens=self.tokens[:count], logprobs=logprobs)


class Sampling(Protocol):
    """How a request's tokens are chosen, in as far as it concerns drafters."""

    @property
    def greedy(self) -> bool:
        """The likeliest token always."""


class Drafter(Protocol):
    """Guesses what the target will emit. One drafter serves one session; what it learns stays in it between requests.

    Calls come in the order begin, (propose, observe)*, end, all from one thread.
    """

    feedback: int  # how many of the target's likeliest tokens `observe` wants to see of every node; 0 = none

    def begin(self, prompt: Ints, prediction: Ints = NOTHING, sampling: Sampling | None = None) -> None:
        """A request starts: int32 [P], all the text the target will have seen, and int32 [M], what the client expects.

        `sampling` is for those who draft as the target will choose; None = greedy.
        """

    def propose(self, budget: int) -> DraftTree:
        """At most `budget` nodes that may follow the committed tokens; empty when nothing is worth verifying."""

    def observe(self, verdict: Verdict) -> None:
        """The target has judged a tree; `verdict.tokens` are committed now."""

    def end(self) -> None:
        """The request is over, finished or cancelled."""
