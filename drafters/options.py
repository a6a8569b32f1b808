"""The drafters' names and settings, as users see them. Imports no numba, so that the front end can validate them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal, get_args

from annotated_types import Ge, Gt, Le

MAX_WINDOW = 32  # tokens of a PEARL window
MAX_MATCH = 16  # tokens of the longest match in a datastore

TableName = Literal["none", "trigram", "retrieval", "lookup", "lookahead", "prediction", "fusion"]
ModelName = Literal["draft", "draft-tree", "draft-graph", "pearl"]  # drafters that need a draft model
DrafterName = Literal[TableName, ModelName]
NAMES: tuple[DrafterName, ...] = get_args(DrafterName)
NEED_A_MODEL: tuple[DrafterName, ...] = get_args(ModelName)
Positive = Annotated[float, Gt(0)]


@dataclass(frozen=True)
class TrigramOptions:
    """The paper's hyper-parameters (Appendix F), but for the search: best-first drafts better, in less time."""

    table: str | None = None  # path of the base table; None = the embedded one, where the tokenizer is the embedded one
    search: Literal["mcts", "best-first", "greedy"] = "best-first"
    order: Annotated[int, Ge(2), Le(4)] = 3  # 3 = tri-grams; the paper's ablation has 2 and 4
    iterations: Annotated[int, Ge(1), Le(10_000)] = 150  # s: of the Monte Carlo search
    c1: Positive = 32.0
    c2: Positive = 8.0
    depth: Annotated[int, Ge(1), Le(32)] = 16  # l: tokens in a continuation; the paper's search has 4
    candidates: Annotated[int, Ge(1), Le(256)] = 24  # n: continuations in a draft
    successors: Annotated[int, Ge(1), Le(64)] = 12  # t: kept per context
    adaptive: bool = True
    feedback: Annotated[int, Ge(0), Le(12)] = 8  # not in the paper: learn the target's top-k at every verified node
    increment: Positive = 1.0  # not in the paper: weight of one emitted tri-gram, a row of the base table weighing 1
    maximum: Positive = 16.0  # not in the paper: where raising a weight stops
    contexts: Annotated[int, Ge(16), Le(1 << 22)] = 16_384  # not in the paper: contexts that a session remembers
    floor: Annotated[float, Ge(0), Le(1)] = 0.002  # not in the paper: least path probability of best-first search
    seed: Annotated[int, Ge(0), Le(1 << 32)] = 0


@dataclass(frozen=True)
class RetrievalOptions:
    """REST's settings (section 3); it takes up to 5000 matches, here fewer, spread evenly over all of them."""

    datastores: tuple[str, ...] = ()  # folders made by `outrider datastore build --kind suffix`
    longest: Annotated[int, Ge(1), Le(MAX_MATCH)] = 16
    shortest: Annotated[int, Ge(1), Le(MAX_MATCH)] = 2
    matches: Annotated[int, Ge(1), Le(5000)] = 128
    length: Annotated[int, Ge(1), Le(32)] = 10  # tokens of a continuation


@dataclass(frozen=True)
class LookupOptions:
    """How a repeated ending is continued."""

    match: Literal["automaton", "ngram"] = "automaton"
    continuation: Literal["tree", "recent", "frequent"] = "tree"  # of the automaton; the last two are chains
    shortest: Annotated[int, Ge(1), Le(64)] = 2  # tokens that must repeat
    length: Annotated[int, Ge(1), Le(64)] = 16  # tokens copied
    ngram: Annotated[int, Ge(1), Le(16)] = 3  # for match: ngram; shorter ones are tried down to 1
    capacity: Annotated[int, Ge(64), Le(1 << 22)] = 16_384  # tokens of text remembered


@dataclass(frozen=True)
class LookaheadOptions:
    """The paper's W, N and G; chosen so that window and guesses fit one verification."""

    window: Annotated[int, Ge(1), Le(32)] = 6  # W
    ngram: Annotated[int, Ge(2), Le(16)] = 5  # N
    guesses: Annotated[int, Ge(1), Le(32)] = 8  # G
    pool_from_prompt: bool = True  # the prompt's n-grams fill the pool, too
    seed: Annotated[int, Ge(0), Le(1 << 32)] = 0


@dataclass(frozen=True)
class PredictionOptions:
    """How the expected text is followed."""

    length: Annotated[int, Ge(1), Le(64)] = 32  # tokens drafted at once
    memory: Annotated[int, Ge(1), Le(64)] = 8  # emitted tokens that are looked for after a departure
    certainty: Annotated[float, Ge(0), Le(1)] = 0.97  # probability of the next token while the text is being followed


@dataclass(frozen=True)
class DraftTreeOptions:
    """The paper's hyper-parameters, appendix A."""

    children: Annotated[int, Ge(1), Le(16)] = 4  # k, the most of one node
    steps: Annotated[int, Ge(1), Le(64)] = 10  # levels
    theta_prob: Annotated[float, Ge(0), Le(1)] = 0.2  # a node less likely than this is a leaf
    theta_sib: Annotated[float, Ge(0), Le(1)] = 0.3  # and one less likely than this share of its likeliest sibling
    thrifty: bool = True  # no level that is expected to cost more than it brings


@dataclass(frozen=True)
class DraftOptions:
    """Of a chain."""

    gamma: Annotated[int, Ge(1), Le(64)] = 10  # tokens
    theta_prob: Annotated[float, Ge(0), Le(1)] = 0.2  # the chain ends with a token less likely than this
    thrifty: bool = True  # and where another one is expected to cost more than it brings

    @property
    def tree(self) -> DraftTreeOptions:
        """A tree of one branch."""
        return DraftTreeOptions(1, self.gamma, self.theta_prob, 0.0, self.thrifty)


@dataclass(frozen=True)
class DraftGraphOptions(DraftTreeOptions):
    """The tree's, and when two places count as one."""

    tau: Annotated[int, Ge(1), Le(8)] = 2  # tokens that recur


@dataclass(frozen=True)
class PearlOptions:
    """The two strategies, and the window where it is not measured."""

    pre_verify: bool = True  # verify the first token while the others are drafted
    post_verify: bool = True  # draft on while tokens are verified
    window: Annotated[int, Ge(0), Le(MAX_WINDOW)] = 0  # gamma, tokens; 0 = the measured ratio of the models' speeds (Theorem 1)
    ahead: Annotated[int, Ge(0), Le(16)] = 3  # tokens that a tri-gram table drafts for the draft model itself


@dataclass(frozen=True)
class FusionOptions:
    """Bounds; what the sources are worth is learned."""

    depth: Annotated[int, Ge(1), Le(64)] = 32  # tokens of the longest path
    capacity: Annotated[int, Ge(64), Le(1 << 22)] = 16_384  # tokens of the session's text remembered
    contexts: Annotated[int, Ge(16), Le(1 << 22)] = 16_384  # table contexts of the session remembered
    successors: Annotated[int, Ge(1), Le(64)] = 12  # kept per table context
    feedback: Annotated[int, Ge(0), Le(12)] = 8  # learn the target's top-k at every verified node; 0 = do not


@dataclass(frozen=True)
class Options:
    """How each drafter works."""

    trigram: TrigramOptions = field(default_factory=TrigramOptions)
    retrieval: RetrievalOptions = field(default_factory=RetrievalOptions)
    lookup: LookupOptions = field(default_factory=LookupOptions)
    lookahead: LookaheadOptions = field(default_factory=LookaheadOptions)
    prediction: PredictionOptions = field(default_factory=PredictionOptions)
    fusion: FusionOptions = field(default_factory=FusionOptions)
    draft: DraftOptions = field(default_factory=DraftOptions)
    draft_tree: DraftTreeOptions = field(default_factory=DraftTreeOptions)
    draft_graph: DraftGraphOptions = field(default_factory=DraftGraphOptions)
    pearl: PearlOptions = field(default_factory=PearlOptions)
