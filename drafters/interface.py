"""The interface between drafters and verifiers: DraftTree, Verdict and the Drafter protocol.

Plain numpy data in frozen dataclasses. Knows nothing about where drafts come from or how they are verified.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from outrider.drafters.options import MAX_NODES as MAX_NODES
from outrider.drafters.sequence import Sequence
from outrider.drafters.state import State

if TYPE_CHECKING:
    from outrider.drafters.tables.suffix import Corpus

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
Corpora: TypeAlias = Collection["Corpus"]

NOTHING: Ints = np.empty(0, np.int32)


class Source(IntEnum):
    """The drafter that proposed a node; stored in `DraftTree.source`."""

    NONE = 0
    TRIGRAM = 1
    RETRIEVAL = 2
    LOOKUP = 3
    LOOKAHEAD = 4
    PREDICTION = 5
    DRAFT = 6
    GRAMMAR = 7
    MERGED = 8  # a draft model's node, copied from another branch
    NOISE = 9  # a token that no table lists, with large noise
    OTHER = 10  # a node of a drafter from another package

    @property
    def label(self) -> str:
        """The name in reports and metrics."""
        return self.name.lower()


@dataclass(frozen=True, eq=False)
class Draws:
    """The children of a node that were sampled from a draft model's distribution, without replacement."""

    q: Floats  # float32 [V]; that distribution
    rows: tuple[int, ...]  # numbers of the nodes, in sampling order


# Gets tokens below the root. Returns the token that a draft model has sampled after them and the distribution that it was
# sampled from, float32 [V]; None if it has sampled none there.
Continuation = Callable[[Collection[int]], tuple[int, Floats] | None]


class Work(NamedTuple):
    """A draft model's work for a step."""

    seconds: float = 0.0  # of its forwards for the tree, before the verification
    invested: float = 0.0  # seconds of reading the text, and of probes: later steps repay them
    beside: bool = False  # whether it drafts beside the verification, too
    reason: str = ""  # for the log
    slowdown: float = 1.0  # how many times as long the verification takes because of it: the models share caches and cores


NO_WORK = Work()


@dataclass(frozen=True, eq=False)
class DraftTree:
    """A draft: a tree of tokens below the root, the last committed token.

    Nodes are stored depth-first, likeliest child first. So the first n nodes always form a tree, and an accepted path
    usually consists of the first nodes.
    """

    tokens: Ints  # int32 [N]
    parents: Ints  # int32 [N]; number of the parent, -1 = the root; parents[i] < i
    depths: Ints  # int32 [N]; children of the root have depth 1
    probability: Floats  # float32 [N]; estimated probability that the whole path to the node is accepted
    source: NDArray[np.uint8]  # uint8 [N]; a Source
    # Draws by the parent's number, -1 = the root. All other nodes are guesses: not sampled, or not for their position in the
    # tree.
    draws: Mapping[int, Draws] = field(default_factory=dict)
    continuation: Continuation | None = None  # extends the tree's chain while it is verified; called after the forward
    work: Work = NO_WORK  # of the whole tree

    def __len__(self) -> int:
        return len(self.tokens)

    def child(self, node: int, token: int) -> int | None:
        """The child of `node` (-1 = the root) with this token."""
        return self._children.get((node, token))

    def follow(self, tokens: Ints) -> Ints:
        """The nodes along `tokens` (int32 [M]) from the root, as far as the tree has them."""
        path: list[int] = []
        for token in tokens.tolist():
            node = self.child(path[-1] if path else -1, token)
            if node is None:
                break
            path.append(node)
        return np.array(path, np.int32)

    def top(self, count: int) -> DraftTree:
        """The `count` likeliest nodes. A node is at most as likely as its parent."""
        if len(self) <= count:
            return self
        order = np.lexsort((np.arange(len(self)), -self.probability))[:count]  # parents precede their children
        return self.keep(np.isin(np.arange(len(self)), order))

    def likeliest(self, tokens: Collection[int], least: float = 0.0) -> list[int]:
        """The likeliest path below the end of `tokens`; it stops at the first node less probable than `least`."""
        path = self.follow(np.array(list(tokens), np.int32)) if len(self) else NOTHING
        if len(path) < len(tokens):
            return []
        first = end = int(path[-1]) + 1 if len(path) else 0
        while end < len(self) and self.parents[end] == end - 1 and self.probability[end] >= least:
            end += 1
        return list(map(int, self.tokens[first:end]))

    @cached_property
    def _children(self) -> dict[tuple[int, int], int]:
        """Nodes by parent and token."""
        keys = zip(self.parents.tolist(), self.tokens.tolist(), strict=True)
        return {key: node for node, key in enumerate(keys)}

    @property
    def drawn(self) -> NDArray[np.bool_]:
        """Whether each node was sampled, bool [N]. Dropping sampled nodes by their tokens would bias rejection sampling."""
        drawn = np.zeros(len(self), np.bool_)
        for draws in self.draws.values():
            drawn[list(draws.rows)] = True
        return drawn

    def limit(self, depth: int) -> DraftTree:
        """The tree without the nodes below `depth`."""
        if not len(self) or int(self.depths.max()) <= depth:
            return self
        return self.keep(self.depths <= depth)

    def keep(self, kept: NDArray[np.bool_]) -> DraftTree:
        """The subtree of the nodes where `kept` (bool [N]) is true.

        The parent of a kept node must be kept, and of the nodes sampled at one parent all or none.
        """
        rows = np.cumsum(kept, dtype=np.int32) - 1
        parents = self.parents[kept]
        draws = {
            int(rows[parent]) if parent >= 0 else -1: Draws(drawn.q, tuple(int(rows[row]) for row in drawn.rows))
            for parent, drawn in self.draws.items()
            if kept[drawn.rows[0]]
        }
        return DraftTree(
            self.tokens[kept],
            np.where(parents >= 0, rows[parents], -1).astype(np.int32),
            self.depths[kept],
            self.probability[kept],
            self.source[kept],
            draws,
            self.continuation,
        )

    @cached_property
    def ancestors(self) -> NDArray[np.bool_]:
        """The attention mask, bool [N+1, N+1]: row i attends to row j. Row 0 is the root, row i+1 node i."""
        size = len(self) + 1
        mask = np.eye(size, dtype=np.bool_)
        for row, parent in enumerate((self.parents + 1).tolist(), start=1):
            mask[row] |= mask[parent]
        return mask

    def path(self, row: int) -> list[int]:
        """The tokens from the root's child down to node `row`."""
        tokens: list[int] = []
        while row >= 0:
            tokens.append(int(self.tokens[row]))
            row = int(self.parents[row])
        return tokens[::-1]


def chain(tokens: Ints, probability: Floats, source: Source) -> DraftTree:
    """A tree without branches, from tokens (int32 [N]) and path probabilities (float32 [N])."""
    size = len(tokens)
    return DraftTree(
        np.asarray(tokens, np.int32),
        np.arange(-1, size - 1, dtype=np.int32),
        np.arange(1, size + 1, dtype=np.int32),
        np.asarray(probability, np.float32),
        np.full(size, source, np.uint8),
    )


def arrange(tokens: list[int], parents: list[int], probability: list[float], source: list[int]) -> tuple[DraftTree, list[int]]:
    """Lays out nodes depth-first, siblings in the given order. Parents precede their children; -1 = the root.

    Returns the tree and, for each of its nodes, the index in the given order.
    """
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    order: list[int] = []
    stack = children.get(-1, [])[::-1]
    while stack:
        node = stack.pop()
        order.append(node)
        stack += children.get(node, [])[::-1]
    row_of, depths = {-1: -1}, {-1: 0}
    for row, node in enumerate(order):
        row_of[node], depths[node] = row, depths[parents[node]] + 1
    tree = DraftTree(
        np.array([tokens[node] for node in order], np.int32),
        np.array([row_of[parents[node]] for node in order], np.int32),
        np.array([depths[node] for node in order], np.int32),
        np.array([probability[node] for node in order], np.float32),
        np.array([source[node] for node in order], np.uint8),
    )
    return tree, order


EMPTY = chain(NOTHING, np.empty(0, np.float32), Source.NONE)


@dataclass(frozen=True, eq=False)
class Logprobs:
    """Natural log-probabilities of emitted tokens in the target's own distribution, before any sampling rule."""

    chosen: Floats  # float32 [A+1]
    top_ids: Ints  # int32 [A+1, K]; the likeliest tokens
    top: Floats  # float32 [A+1, K]

    def cut(self, count: int) -> Logprobs:
        """The entries of the first `count` tokens."""
        return Logprobs(self.chosen[:count], self.top_ids[:count], self.top[:count])


@dataclass(frozen=True, eq=False)
class Verdict:
    """The target's verdict on a tree."""

    tree: DraftTree
    path: Ints  # int32 [A]; the accepted nodes, from the root's child down
    tokens: Ints  # int32 [A+1]; the emitted tokens: the accepted ones and the bonus token
    topk_ids: Ints = field(default_factory=lambda: np.empty((0, 0), np.int32))  # int32 [N+1, K], likeliest first
    topk_probs: Floats = field(default_factory=lambda: np.empty((0, 0), np.float32))  # float32 [N+1, K]
    seconds: float = 0.0  # time of the target's forward and sampling
    logprobs: Logprobs | None = None  # if the request asks for them

    @property
    def feedback(self) -> tuple[Ints, Floats]:
        """The target's likeliest tokens at each node, and their probabilities, as the compiled library reads them."""
        return np.ascontiguousarray(self.topk_ids, np.int32), np.ascontiguousarray(self.topk_probs, np.float32)

    def cut(self, count: int) -> Verdict:
        """The verdict limited to the first `count` emitted tokens (a stop inside an accepted block)."""
        if count >= len(self.tokens):
            return self
        logprobs = self.logprobs and self.logprobs.cut(count)
        return replace(self, path=self.path[:count], tokens=self.tokens[:count], logprobs=logprobs)


class Sampling(Protocol):
    """The part of a request's sampling parameters that drafters use."""

    @property
    def greedy(self) -> bool:
        """Whether the target always takes the likeliest token."""

    @property
    def temperature(self) -> float: ...

    @property
    def top_k(self) -> int: ...

    @property
    def filters(self) -> bool:
        """Whether unlikely tokens are excluded."""

    @property
    def seed(self) -> int: ...

    @property
    def rule(self) -> str:
        """The acceptance rule: `keyed` or `rejection`."""


class Drafter(Protocol):
    """Proposes continuations. One drafter serves one session and keeps what it learns between requests.

    Calls come in the order begin, (propose, observe)*, end, all from one thread. A copy (`copy.deepcopy`) is a drafter for
    another session that has learned the same.
    """

    feedback: int  # number of the target's likeliest tokens per node that `observe` uses; 0 = none

    @property
    def prunable(self) -> bool:
        """Whether nodes of the last proposed tree may be dropped before verification."""

    def begin(
        self, sequence: Sequence, prediction: Ints = NOTHING, sampling: Sampling | None = None, corpora: Corpora | None = None
    ) -> None:
        """Starts a request whose prompt is the sequence's text; `prediction` (int32 [M]) is the output the client expects.

        `sampling` is for drafters that sample as the target does; None = greedy. `corpora` takes the place of the drafter's own
        corpora for this request and has the same number of blocks.
        """

    def propose(self, budget: int, least: float = 0.0) -> DraftTree:
        """Proposes at most `budget` nodes below the sequence's last token; empty if nothing is worth verifying.

        Nodes whose path probability is not above `least` would not be verified, so a drafter need not propose them.
        """

    def observe(self, verdict: Verdict) -> None:
        """Learns from a verdict. The sequence already ends with `verdict.tokens`."""

    def end(self) -> None:
        """Ends the request, finished or cancelled."""

    def state(self) -> State:
        """The drafter's learned state, from which a new one continues like this one. Copy the arrays: they may be its own."""

    def load(self, saved: State, text: Sequence) -> None:
        """Restores a state, once, in a new drafter of a session with this text. Raises StateError if it does not fit."""
