"""Settings of speculative decoding: the drafter, what it drafts from, and how many nodes it may draft."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from outrider.drafters.options import MAX_NODES, DrafterName, Options, PearlOptions, RetrievalOptions, TrigramOptions
from outrider.server.settings.section import Section


class Trigram(Section):
    """The n-grams of the `trigram` and `fusion` drafters."""

    table: str | None = Field(None, description="Base table file; null uses the embedded one if the model has its tokenizer.")


class Retrieval(Section):
    """The texts that the `retrieval` and `fusion` drafters search."""

    datastores: tuple[str, ...] = Field(
        (), description="Folders made by `outrider datastore build --kind suffix` or `outrider datastore watch`."
    )


class Pearl(Section):
    """The `pearl` drafter."""

    only_if_worth: bool = Field(
        True,
        description="Also draft as `lookup` does, and use the draft model only if that pays; false runs the paper's algorithm.",
    )


class Speculation(Section):
    """Speculative decoding: the drafter and its node budget."""

    drafter: DrafterName = Field(
        "fusion", description="Default drafter; draft, draft-tree, draft-graph and pearl need a draft model."
    )
    max_nodes: Literal["auto"] | Annotated[int, Field(ge=0, le=MAX_NODES)] = Field(
        "auto", description="Maximum draft nodes per step; auto chooses by measured costs, 0 is plain decoding."
    )
    cost_folder: Path | None = Field(
        Path("~/.cache/outrider"),
        description="Folder of measured step costs, kernels and tried chat templates; null finds them at every start.",
    )
    trace: bool | None = Field(
        None, description="Let requests see the drafts of their steps; null allows it if there are no API keys."
    )
    trigram: Trigram = Trigram()
    retrieval: Retrieval = Retrieval()
    pearl: Pearl = Pearl()

    @property
    def options(self) -> Options:
        return Options(
            trigram=TrigramOptions(table=self.trigram.table),
            retrieval=RetrievalOptions(datastores=self.retrieval.datastores),
            pearl=PearlOptions(only_if_worth=self.pearl.only_if_worth),
        )
