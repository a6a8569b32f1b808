"""The drafters' names and options. Imports little, so that the front end can validate them.

Installed packages add drafters with the entry-point group `outrider.drafters`. Their names are read here; the packages are
imported when such a drafter is made (`outrider.drafters.registry`).

The server sets few of the options (`outrider.server.settings.Speculation`).
"""

from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Literal, get_args

MAX_NODES = 128
MAX_WINDOW = 32

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
# When a draft model drafts in addition to tables: before a verification, or beside it.
DraftTime = Literal["auto", "before", "during", "never"]


@dataclass(frozen=True)
class TrigramOptions:
    # Base table file. By default the embedded table, if the model has the embedded tokenizer, otherwise none.
    table: str | None = None
    # Maximum contexts stored per session. Not in the paper.
    contexts: int = 16_384


@dataclass(frozen=True)
class RetrievalOptions:
    """The `retrieval` drafter (REST, section 3)."""

    # Folders made by `outrider datastore build --kind suffix` or `outrider datastore watch`.
    datastores: tuple[str, ...] = ()
    # Tokens read after each match.
    length: int = 10


@dataclass(frozen=True)
class LookupOptions:
    """The `lookup` drafter: continues repeated text of the session."""

    # Minimum length of the repeated suffix in tokens.
    shortest: int = 2
    # Tokens of text indexed per session.
    capacity: int = 16_384


@dataclass(frozen=True)
class LookaheadOptions:
    """The `lookahead` drafter. Defaults keep window and guesses within one verification."""

    # Lookahead window size (W in the paper).
    window: int = 6
    # N-gram length (N in the paper).
    ngram: int = 5
    # Maximum n-grams verified per step (G in the paper).
    guesses: int = 8


@dataclass(frozen=True)
class DraftOptions:
    """The `draft` drafter (SSD): the draft model's chain, drafted before a verification."""

    # Maximum length of a draft: one draft-model forward per token.
    steps: int = 16
    # Stop drafting when the next token is expected to cost more time than it saves.
    only_if_worth: bool = True


@dataclass(frozen=True)
class DraftTreeOptions:
    """The `draft-tree` drafter (TSD): the draft model's tree. Defaults from the GSD paper, appendix A."""

    # Maximum children per node (k in the paper).
    children: int = 4
    # Maximum tree depth: one draft-model forward per level.
    steps: int = 10
    # Nodes whose token is less probable than this are not expanded.
    theta_prob: float = 0.2
    # Nodes less probable than this fraction of their most probable sibling are not expanded.
    theta_sib: float = 0.3
    # Stop drafting when the next level is expected to cost more time than it saves.
    only_if_worth: bool = True


@dataclass(frozen=True)
class DraftGraphOptions(DraftTreeOptions):
    """The `draft-graph` drafter (GSD): the draft model's tree, with repeated branches merged."""

    # Repeated tokens after which two nodes are merged.
    tau: int = 2


@dataclass(frozen=True)
class PearlOptions:
    """The `pearl` drafter: drafts in parallel with verification."""

    # Also draft as `lookup` does, and use the draft model only when that is expected to pay, before or during a step. If
    # false, the paper's algorithm runs.
    only_if_worth: bool = True
    # Draft window in tokens (gamma); 0 uses the measured speed ratio of the two models (Theorem 1).
    window: int = 0


@dataclass(frozen=True)
class FusionOptions:
    """The `fusion` drafter: one mixture of all sources, whose weights are learned."""

    # Tokens of text indexed per session.
    capacity: int = 16_384
    # Maximum table contexts stored per session.
    contexts: int = 16_384
    # When a draft model drafts: before a verification, during it, never, or `auto`: whichever saves most time.
    draft: DraftTime = "auto"


@dataclass(frozen=True)
class Options:
    trigram: TrigramOptions = field(default_factory=TrigramOptions)
    retrieval: RetrievalOptions = field(default_factory=RetrievalOptions)
    lookup: LookupOptions = field(default_factory=LookupOptions)
    lookahead: LookaheadOptions = field(default_factory=LookaheadOptions)
    fusion: FusionOptions = field(default_factory=FusionOptions)
    draft: DraftOptions = field(default_factory=DraftOptions)
    draft_tree: DraftTreeOptions = field(default_factory=DraftTreeOptions)
    draft_graph: DraftGraphOptions = field(default_factory=DraftGraphOptions)
    pearl: PearlOptions = field(default_factory=PearlOptions)
