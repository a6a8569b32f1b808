"""The drafters' names and options. Imports no numba, so that the front end can validate them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeVar, get_args

from annotated_types import Ge, Gt, Le

MAX_NODES = 128  # draft nodes in one forward
MAX_WINDOW = 32  # tokens of a PEARL window
MAX_MATCH = 16  # tokens of the longest match in a datastore

TableName = Literal["none", "trigram", "retrieval", "lookup", "lookahead", "prediction", "fusion"]
ModelName = Literal["draft", "draft-tree", "draft-graph", "pearl"]  # drafters that need a draft model
DrafterName = Literal[TableName, ModelName]
NAMES: tuple[DrafterName, ...] = get_args(DrafterName)
NEED_A_MODEL: tuple[DrafterName, ...] = get_args(ModelName)
DraftTime = Literal["auto", "before", "beside", "never"]  # of a draft model beside tables
Positive = Annotated[float, Gt(0)]

Value = TypeVar("Value")


def option(default: Value, description: str) -> Value:
    """A dataclass field with a description, which help texts and the documentation show."""
    return field(default=default, metadata={"description": description})


@dataclass(frozen=True)
class TrigramOptions:
    """The `trigram` drafter. Defaults follow the paper (ADED, Appendix F), except for the search and for adaptation."""

    table: str | None = option(
        None, "Base table file. By default the embedded table, if the model has the embedded tokenizer, otherwise none."
    )
    search: Literal["mcts", "best-first", "greedy"] = option(
        "best-first", "Search that builds the draft. The paper uses mcts; best-first drafts better in less time."
    )
    order: Annotated[int, Ge(2), Le(4)] = option(3, "N-gram order: 3 for tri-grams. The paper's ablation also has 2 and 4.")
    iterations: Annotated[int, Ge(1), Le(10_000)] = option(150, "Monte Carlo rollouts per draft (s in the paper).")
    c1: Positive = option(32.0, "Exploration constant c1 of the Monte Carlo search.")
    c2: Positive = option(8.0, "Exploration constant c2 of the Monte Carlo search.")
    depth: Annotated[int, Ge(1), Le(32)] = option(16, "Maximum draft depth in tokens (l in the paper, which uses 4).")
    candidates: Annotated[int, Ge(1), Le(256)] = option(
        24, "Maximum number of continuations in a draft of the Monte Carlo search (n in the paper); 24 have about 50 nodes."
    )
    successors: Annotated[int, Ge(1), Le(64)] = option(12, "Successors stored per context (t in the paper).")
    ranking: Literal["path", "score"] = option(
        "score",
        "How the Monte Carlo search ranks continuations: by the rewards of all visits (the paper), or by path probability.",
    )
    adaptive: bool = option(True, "Update the table with the session's own text.")
    max_length: Annotated[int, Ge(0), Le(1 << 16)] = option(
        0,
        "Adapt as the paper's Algorithm 2 does: raise the n-grams of this many last tokens (maxLength) in each step, "
        "and use no feedback. 0 raises each n-gram once, those of the whole prompt too.",
    )
    feedback: Annotated[int, Ge(0), Le(12)] = option(
        8, "Learn the target's top-k tokens at every verified node, rejected ones included; 0 disables it. Not in the paper."
    )
    increment: Positive = option(
        1.0, "Weight added per raised n-gram; a row of the base table has total weight 1. The paper does not give its value."
    )
    maximum: Positive = option(16.0, "Upper bound of a raised weight. The paper does not give its value.")
    contexts: Annotated[int, Ge(16), Le(1 << 22)] = option(16_384, "Maximum contexts stored per session. Not in the paper.")
    floor: Annotated[float, Ge(0), Le(1)] = option(
        0.002, "Minimum path probability that best-first search expands. Not in the paper."
    )
    seed: Annotated[int, Ge(0), Le(1 << 32)] = option(0, "Random seed of the Monte Carlo search.")


@dataclass(frozen=True)
class RetrievalOptions:
    """The `retrieval` drafter (REST, section 3). REST reads up to 5000 matches; this drafter reads an even sample of them."""

    datastores: tuple[str, ...] = option(
        (), "Folders made by `outrider datastore build --kind suffix` or `outrider datastore watch`."
    )
    longest: Annotated[int, Ge(1), Le(MAX_MATCH)] = option(16, "Maximum match length in tokens.")
    shortest: Annotated[int, Ge(1), Le(MAX_MATCH)] = option(
        1, "Minimum match length in tokens. The acceptance measured for each length limits what short matches draft."
    )
    matches: Annotated[int, Ge(1), Le(5000)] = option(128, "Maximum matches read per step, sampled evenly from all of them.")
    length: Annotated[int, Ge(1), Le(32)] = option(10, "Tokens read after each match.")


@dataclass(frozen=True)
class LookupOptions:
    """The `lookup` drafter: continues repeated text of the session."""

    shortest: Annotated[int, Ge(1), Le(64)] = option(2, "Minimum length of the repeated suffix in tokens.")
    length: Annotated[int, Ge(1), Le(MAX_NODES)] = option(16, "Tokens copied per match.")
    capacity: Annotated[int, Ge(64), Le(1 << 22)] = option(16_384, "Tokens of text indexed per session.")


@dataclass(frozen=True)
class LookaheadOptions:
    """The `lookahead` drafter. Defaults keep window and guesses within one verification."""

    window: Annotated[int, Ge(1), Le(32)] = option(6, "Lookahead window size (W in the paper).")
    ngram: Annotated[int, Ge(2), Le(16)] = option(5, "N-gram length (N in the paper).")
    guesses: Annotated[int, Ge(1), Le(32)] = option(8, "Maximum n-grams verified per step (G in the paper).")
    pool_from_prompt: bool = option(True, "Also fill the n-gram pool from the prompt.")
    seed: Annotated[int, Ge(0), Le(1 << 32)] = option(0, "Random seed of the initial window.")


@dataclass(frozen=True)
class PredictionOptions:
    """The `prediction` drafter: follows the text of the request's `prediction` field."""

    length: Annotated[int, Ge(1), Le(MAX_NODES)] = option(32, "Tokens drafted per step.")
    memory: Annotated[int, Ge(1), Le(64)] = option(
        8, "Emitted tokens used to find the position in the predicted text after the answer departs from it."
    )
    certainty: Annotated[float, Ge(0), Le(1)] = option(
        0.97, "Assumed probability that the next predicted token is accepted while the answer follows the predicted text."
    )


@dataclass(frozen=True)
class DraftTreeOptions:
    """The `draft-tree` drafter (TSD): the draft model's tree. Defaults from the GSD paper, appendix A."""

    children: Annotated[int, Ge(1), Le(16)] = option(4, "Maximum children per node (k in the paper).")
    steps: Annotated[int, Ge(1), Le(MAX_NODES)] = option(10, "Maximum tree depth: one draft-model forward per level.")
    theta_prob: Annotated[float, Ge(0), Le(1)] = option(0.2, "Nodes whose token is less probable than this are not expanded.")
    theta_sib: Annotated[float, Ge(0), Le(1)] = option(
        0.3, "Nodes less probable than this fraction of their most probable sibling are not expanded."
    )
    thrifty: bool = option(True, "Stop drafting when the next level is expected to cost more time than it saves.")


@dataclass(frozen=True)
class DraftOptions:
    """The `draft` drafter (SSD): the draft model's chain."""

    gamma: Annotated[int, Ge(1), Le(MAX_NODES)] = option(10, "Maximum chain length in tokens.")
    theta_prob: Annotated[float, Ge(0), Le(1)] = option(0.2, "The chain ends at a token less probable than this.")
    thrifty: bool = option(
        True,
        "Stop drafting when the next token is expected to cost more time than it saves.",
    )

    @property
    def tree(self) -> DraftTreeOptions:
        """A tree of one branch."""
        return DraftTreeOptions(children=1, steps=self.gamma, theta_prob=self.theta_prob, theta_sib=0.0, thrifty=self.thrifty)


@dataclass(frozen=True)
class DraftGraphOptions(DraftTreeOptions):
    """The `draft-graph` drafter (GSD): the draft model's tree, with repeated branches merged."""

    tau: Annotated[int, Ge(1), Le(8)] = option(2, "Repeated tokens after which two nodes are merged.")


@dataclass(frozen=True)
class PearlOptions:
    """The `pearl` drafter: drafts in parallel with verification."""

    thrifty: bool = option(
        True,
        "Also draft as `lookup` does, and use the draft model only when that is expected to pay, before or during a step. "
        "If this, pre_verify or post_verify is false, the paper's algorithm runs.",
    )
    pre_verify: bool = option(True, "Verify the first draft token while the draft model drafts the rest.")
    post_verify: bool = option(True, "Continue drafting during verification.")
    window: Annotated[int, Ge(0), Le(MAX_WINDOW)] = option(
        0, "Draft window in tokens (gamma); 0 uses the measured speed ratio of the two models (Theorem 1)."
    )
    ahead: Annotated[int, Ge(0), Le(16)] = option(
        3, "Tokens that a tri-gram table drafts for the draft model itself; 0 disables it. Not in the paper."
    )


@dataclass(frozen=True)
class FusionOptions:
    """The `fusion` drafter: one mixture of all sources, whose weights are learned."""

    depth: Annotated[int, Ge(1), Le(MAX_NODES)] = option(32, "Maximum path length in tokens.")
    capacity: Annotated[int, Ge(64), Le(1 << 22)] = option(16_384, "Tokens of text indexed per session.")
    contexts: Annotated[int, Ge(16), Le(1 << 22)] = option(16_384, "Maximum table contexts stored per session.")
    successors: Annotated[int, Ge(1), Le(64)] = option(12, "Successors stored per table context.")
    feedback: Annotated[int, Ge(0), Le(12)] = option(
        8, "Learn the target's top-k tokens at every verified node; 0 disables it."
    )
    draft: DraftTime = option(
        "auto",
        "When a draft model drafts: before a verification, beside (during) it, never, or `auto`: whichever saves most time.",
    )


@dataclass(frozen=True)
class Options:
    """The options of all drafters."""

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
