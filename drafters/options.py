"""The drafters' names and options. Imports little, so that the front end can validate them.

Installed packages add drafters with the entry-point group `outrider.drafters`. Their names are read here; the packages are
imported when such a drafter is made (`outrider.drafters.registry`).

The server sets few of the options (`outrider.server.settings.speculation.Speculation`); experiments set any of them
(`bench.drafter_options`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Annotated, Literal, get_args

from annotated_types import Ge, Gt, Le

MAX_NODES = 128
MAX_WINDOW = 32
MAX_MATCH = 16

TableName = Literal["none", "trigram", "retrieval", "lookup", "lookahead", "prediction", "fusion"]
ModelName = Literal["draft", "draft-tree", "draft-graph", "pearl"]
BuiltInName = Literal[TableName, ModelName]
# Drafters of other packages by name. None replaces one of ours.
INSTALLED: dict[str, EntryPoint] = {
    found.name: found for found in entry_points(group="outrider.drafters") if found.name not in get_args(BuiltInName)
}
if TYPE_CHECKING:
    DrafterName = str
else:
    DrafterName = Literal[(*get_args(BuiltInName), *INSTALLED)]
NAMES: tuple[DrafterName, ...] = get_args(DrafterName)
NEED_A_MODEL: tuple[DrafterName, ...] = get_args(ModelName)
# When a draft model drafts in addition to tables: before a verification, or during it.
DraftTime = Literal["auto", "before", "during", "never"]
Positive = Annotated[float, Gt(0)]
Probability = Annotated[float, Ge(0), Le(1)]
Seed = Annotated[int, Ge(0), Le(1 << 32)]
Nodes = Annotated[int, Ge(1), Le(MAX_NODES)]
Successors = Annotated[int, Ge(1), Le(64)]
Contexts = Annotated[int, Ge(16), Le(1 << 22)]
TextTokens = Annotated[int, Ge(64), Le(1 << 22)]
Feedback = Annotated[int, Ge(0), Le(12)]


@dataclass(frozen=True)
class TrigramOptions:
    """The `trigram` drafter. Defaults follow the paper (ADED, Appendix F), except for the search and for adaptation."""

    # Base table file. By default the embedded table, if the model has the embedded tokenizer, otherwise none.
    table: str | None = None
    # Search that builds the draft. The paper uses mcts; best-first drafts better in less time.
    search: Literal["mcts", "best-first", "greedy"] = "best-first"
    # N-gram order: 3 for tri-grams. The paper's ablation also has 2 and 4.
    order: Annotated[int, Ge(2), Le(4)] = 3
    # Monte Carlo rollouts per draft (s in the paper).
    iterations: Annotated[int, Ge(1), Le(10_000)] = 150
    # Exploration constants of the Monte Carlo search.
    c1: Positive = 32.0
    c2: Positive = 8.0
    # Maximum draft depth in tokens (l in the paper, which uses 4).
    depth: Annotated[int, Ge(1), Le(32)] = 16
    # Maximum number of continuations in a draft of the Monte Carlo search (n in the paper); 24 have about 50 nodes.
    candidates: Annotated[int, Ge(1), Le(256)] = 24
    # Successors stored per context (t in the paper).
    successors: Successors = 12
    # How the Monte Carlo search ranks continuations: by the rewards of all visits (the paper), by path probability, or
    # single nodes by visits (the authors' code).
    ranking: Literal["path", "score", "visits"] = "score"
    # The reward of a rollout: the geometric mean of its tokens' probabilities, or 1 plus their sum (as the paper prints it).
    reward: Literal["mean", "sum"] = "mean"
    # Update the table with the session's own text.
    adaptive: bool = True
    # Adapt as the paper's Algorithm 2 does: raise the n-grams of this many last tokens (maxLength) in each step, and use no
    # feedback. 0 raises each n-gram once, those of the whole prompt too.
    max_length: Annotated[int, Ge(0), Le(1 << 16)] = 0
    # Learn the target's top-k tokens at every verified node, rejected ones included; 0 disables it. Not in the paper.
    feedback: Feedback = 8
    # Weight added per raised n-gram; a row of the base table has total weight 1. The paper does not give its value.
    increment: Positive = 1.0
    # Upper bound of a raised weight. The paper does not give its value.
    maximum: Positive = 16.0
    # Maximum contexts stored per session. Not in the paper.
    contexts: Contexts = 16_384
    # Minimum path probability that best-first search expands. Not in the paper.
    floor: Probability = 0.002
    # Random seed of the Monte Carlo search.
    seed: Seed = 0


@dataclass(frozen=True)
class RetrievalOptions:
    """The `retrieval` drafter (REST, section 3). REST reads up to 5000 matches; this drafter reads an even sample of them."""

    # Folders made by `outrider datastore build --kind suffix` or `outrider datastore watch`.
    datastores: tuple[str, ...] = ()
    # Maximum match length in tokens.
    longest: Annotated[int, Ge(1), Le(MAX_MATCH)] = 16
    # Minimum match length in tokens. The acceptance measured for each length limits what short matches draft.
    shortest: Annotated[int, Ge(1), Le(MAX_MATCH)] = 1
    # Maximum matches read per step, sampled evenly from all of them.
    matches: Annotated[int, Ge(1), Le(5000)] = 128
    # Tokens read after each match.
    length: Annotated[int, Ge(1), Le(32)] = 10


@dataclass(frozen=True)
class LookupOptions:
    """The `lookup` drafter: continues repeated text of the session."""

    # Minimum length of the repeated suffix in tokens.
    shortest: Annotated[int, Ge(1), Le(64)] = 2
    # Tokens copied per match.
    length: Nodes = 16
    # Tokens of text indexed per session.
    capacity: TextTokens = 16_384


@dataclass(frozen=True)
class LookaheadOptions:
    """The `lookahead` drafter. Defaults keep window and guesses within one verification."""

    # Lookahead window size (W in the paper).
    window: Annotated[int, Ge(1), Le(32)] = 6
    # N-gram length (N in the paper).
    ngram: Annotated[int, Ge(2), Le(16)] = 5
    # Maximum n-grams verified per step (G in the paper).
    guesses: Annotated[int, Ge(1), Le(32)] = 8
    # Also fill the n-gram pool from the prompt.
    pool_from_prompt: bool = True
    # Random seed of the initial window.
    seed: Seed = 0


@dataclass(frozen=True)
class PredictionOptions:
    """The `prediction` drafter: follows the text of the request's `prediction` field."""

    # Tokens drafted per step.
    length: Nodes = 32
    # Emitted tokens used to find the position in the predicted text after the answer departs from it.
    memory: Annotated[int, Ge(1), Le(64)] = 8
    # Assumed probability that the next predicted token is accepted while the answer follows the predicted text.
    certainty: Probability = 0.97


@dataclass(frozen=True)
class DraftTreeOptions:
    """The `draft-tree` drafter (TSD): the draft model's tree. Defaults from the GSD paper, appendix A."""

    # Maximum children per node (k in the paper).
    children: Annotated[int, Ge(1), Le(16)] = 4
    # Maximum tree depth: one draft-model forward per level.
    steps: Nodes = 10
    # Nodes whose token is less probable than this are not expanded.
    theta_prob: Probability = 0.2
    # Nodes less probable than this fraction of their most probable sibling are not expanded.
    theta_sib: Probability = 0.3
    # Stop drafting when the next level is expected to cost more time than it saves.
    only_if_worth: bool = True


@dataclass(frozen=True)
class DraftOptions:
    """The `draft` drafter (SSD): the draft model's chain."""

    # Maximum chain length in tokens.
    gamma: Nodes = 10
    # The chain ends at a token less probable than this.
    theta_prob: Probability = 0.2
    # Stop drafting when the next token is expected to cost more time than it saves.
    only_if_worth: bool = True

    @property
    def tree(self) -> DraftTreeOptions:
        """A tree of one branch."""
        return DraftTreeOptions(
            children=1, steps=self.gamma, theta_prob=self.theta_prob, theta_sib=0.0, only_if_worth=self.only_if_worth
        )


@dataclass(frozen=True)
class DraftGraphOptions(DraftTreeOptions):
    """The `draft-graph` drafter (GSD): the draft model's tree, with repeated branches merged."""

    # Repeated tokens after which two nodes are merged.
    tau: Annotated[int, Ge(1), Le(8)] = 2


@dataclass(frozen=True)
class PearlOptions:
    """The `pearl` drafter: drafts in parallel with verification."""

    # Also draft as `lookup` does, and use the draft model only when that is expected to pay, before or during a step. If
    # this, pre_verify or post_verify is false, the paper's algorithm runs.
    only_if_worth: bool = True
    # Verify the first draft token while the draft model drafts the rest.
    pre_verify: bool = True
    # Continue drafting during verification.
    post_verify: bool = True
    # Draft window in tokens (gamma); 0 uses the measured speed ratio of the two models (Theorem 1).
    window: Annotated[int, Ge(0), Le(MAX_WINDOW)] = 0
    # Tokens that a tri-gram table drafts for the draft model itself; 0 disables it. Not in the paper.
    ahead: Annotated[int, Ge(0), Le(16)] = 3


@dataclass(frozen=True)
class FusionOptions:
    """The `fusion` drafter: one mixture of all sources, whose weights are learned."""

    # Maximum path length in tokens.
    depth: Nodes = 32
    # Tokens of text indexed per session.
    capacity: TextTokens = 16_384
    # Maximum table contexts stored per session.
    contexts: Contexts = 16_384
    # Successors stored per table context.
    successors: Successors = 12
    # Learn the target's top-k tokens at every verified node; 0 disables it.
    feedback: Feedback = 8
    # When a draft model drafts: before a verification, during it, never, or `auto`: whichever saves most time.
    draft: DraftTime = "auto"


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
